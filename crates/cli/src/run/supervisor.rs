//! Runs a command under held locks, and ends it before the locks can have another holder.
//!
//! - The group of the command gets TERM when a lock is lost, or when only `grace` and [`margin`](Limits::margin) are
//!   left of the validity because the locks were not renewed. It gets KILL after `grace`, and `margin` before the end of
//!   the validity at the latest.
//! - If this program is stopped, the keeper kills the group `margin` before the end of the validity.
//! - When the command has ended, the rest of its group gets TERM and KILL, too. Then the locks are released.

use std::fmt::Display;
use std::io;
use std::process::Command;
use std::time::{Duration, SystemTime};

use leasehold::Error;
use leasehold::crossbeam_channel::Receiver;
use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitStatus, kill_process};
use signal_hook::consts::{SIGCHLD, SIGCONT, SIGINT, SIGTSTP, SIGTTIN, SIGTTOU};

use crate::exit::{Failure, NOT_EXECUTABLE, NOT_FOUND, SIGNALED, SYSTEM};
use crate::job;
use crate::output::{message, unix_millis};
use crate::run::group::Group;
use crate::run::hold::{Hold, names};
use crate::run::left::{self, Child};
use crate::run::signals::{self, Event, FORWARDED, Signals};
use crate::run::terminal::{self, Terminal};
use crate::time;

/// The pause between two checks while the group ends.
const POLL: Duration = Duration::from_millis(5);
/// The time in which killed processes should end. A process in an uninterruptible system call takes longer.
const KILL_LIMIT: Duration = Duration::from_secs(1);
/// If the keeper and the command were killed together, the command may end this much later.
const KEEPER_FIRST: Duration = Duration::from_millis(100);
/// The maximum time between two checks of the clock.
const LONGEST_WAIT: Duration = Duration::from_secs(3_600);

/// The exit code of a command that SIGKILL has ended.
const KILLED: u8 = SIGNALED + 9;

/// How a command ended.
pub enum Outcome {
    /// By itself, with this exit code; 128 + n after the signal n.
    Exited(u8),
    /// By Ctrl-C, while the command had the terminal.
    Interrupted,
    /// The command was not started, and this program ends with this exit code.
    NotStarted(u8),
    /// The locks were lost, or could not be renewed, for this reason.
    Lost(String),
}

impl Outcome {
    /// The locks were lost before the start of the command.
    pub fn lost_before_start(reason: &impl Display) -> Self {
        Self::Lost(format!("{reason}; the command was not started"))
    }
}

/// The times of the supervision.
#[derive(Clone, Copy)]
pub struct Limits {
    pub ttl: Duration,
    /// The time between TERM and KILL.
    pub grace: Duration,
}

impl Limits {
    /// The group gets KILL this long before the end of the validity. The system may take this time to end the group.
    fn margin(self) -> Duration {
        let most = Duration::from_secs(1).min(self.ttl / 10);
        (self.grace / 5).max(Duration::from_millis(50)).min(most)
    }

    /// The times until the group gets TERM and KILL, if the locks are not renewed in the rest of their validity.
    fn until_term_and_kill(self, remaining: Duration) -> (Duration, Duration) {
        let kill = remaining.saturating_sub(self.margin());
        (kill.saturating_sub(self.grace), kill)
    }
}

/// Runs `command` while all of `holds` are held.
pub fn run(
    command: &mut Command,
    holds: &[&dyn Hold],
    signals: &Signals,
    limits: Limits,
    group: &mut Group,
    known: &[Pid],
) -> Result<Outcome, Failure> {
    let events = match signals.begin() {
        Ok(events) => events,
        Err(signal) => return Ok(Outcome::NotStarted(signals::code(signal))),
    };
    for hold in holds {
        hold.report_loss(Box::new(signals.loss_reporter()));
    }
    // The lock may have been lost since its grant, while this program was stopped.
    if let Err(reason) = set_deadline(holds, limits, group) {
        return Ok(Outcome::lost_before_start(&reason));
    }
    set_environment(command, holds);
    let terminal = Terminal::find(group.id());
    // The group exists already, so the command never reads from the terminal as a background process.
    let has_terminal = terminal.as_ref().is_some_and(Terminal::give_early);
    let child = group.spawn(command);
    let child = child.or_else(|error| match by_shell(command, &error) {
        Some(mut shell) => group.spawn(&mut shell),
        None => Err(error),
    });
    let child = match child {
        Ok(child) => child,
        Err(error) => {
            if let Some(terminal) = &terminal {
                terminal.take();
            }
            return Err(cannot_start(command, &error));
        }
    };
    let mut known = known.to_vec();
    known.push(group.id());
    let supervisor = Supervisor {
        holds,
        events,
        limits,
        group,
        terminal,
        has_terminal,
        child,
        known,
        ended: None,
        has_passed_on_int: false,
        is_interrupted: false,
        is_hung_up: false,
    };
    Ok(supervisor.run())
}

/// The command by the shell, if it is a script without `#!`: cron and `flock(1)` run such scripts.
fn by_shell(command: &Command, error: &io::Error) -> Option<Command> {
    let program = command.get_program();
    let is_script = error.raw_os_error() == Some(Errno::NOEXEC.raw_os_error())
        && program.as_encoded_bytes().contains(&b'/');
    let mut shell = Command::new("/bin/sh");
    shell.arg(program).args(command.get_args());
    for (name, value) in command.get_envs() {
        match value {
            Some(value) => shell.env(name, value),
            None => shell.env_remove(name),
        };
    }
    is_script.then_some(shell)
}

/// Sets the variables that describe the locks. Replaces those of an outer `leasehold run`.
fn set_environment(command: &mut Command, holds: &[&dyn Hold]) {
    let tokens: Vec<_> = holds.iter().flat_map(|hold| hold.tokens()).collect();
    let keys: Vec<&str> = tokens.iter().map(|(key, _)| *key).collect();
    let token = |(_, token): &(&str, Option<u64>)| token.map(|token| token.to_string());
    let tokens: Option<Vec<String>> = tokens.iter().map(token).collect();
    let deadline = unix_millis(SystemTime::now() + remaining(holds));
    // A key contains no line break, so each line is a key.
    for (name, value) in [
        ("LEASEHOLD_KEY", Some(keys.join("\n"))),
        ("LEASEHOLD_TOKEN", tokens.map(|tokens| tokens.join("\n"))),
        ("LEASEHOLD_DEADLINE", Some(deadline.to_string())),
    ] {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
}

/// Tells the keeper when to kill the group. Returns the time until the group must get TERM unless the locks are renewed.
/// Fails with the reason if the locks are lost, or if the group must get TERM now.
fn set_deadline(
    holds: &[&dyn Hold],
    limits: Limits,
    group: &mut Group,
) -> Result<Duration, String> {
    check(holds).map_err(|error| error.to_string())?;
    let (term, kill) = limits.until_term_and_kill(remaining(holds));
    group.set_deadline(time::now() + kill);
    if term.is_zero() {
        let tokens = holds.iter().flat_map(|hold| hold.tokens());
        let names = names(tokens.map(|(key, _)| key));
        return Err(format!("{names} could not be renewed in time"));
    }
    Ok(term)
}

fn check(holds: &[&dyn Hold]) -> Result<(), Error> {
    holds.iter().try_for_each(|hold| hold.check())
}

/// The rest of the validity of all locks.
fn remaining(holds: &[&dyn Hold]) -> Duration {
    let all = holds.iter().map(|hold| hold.remaining());
    all.min().unwrap_or_default()
}

fn cannot_start(command: &Command, error: &io::Error) -> Failure {
    let code = match error.kind() {
        io::ErrorKind::NotFound => NOT_FOUND,
        _ => NOT_EXECUTABLE,
    };
    Failure::new(
        code,
        format!("{}: {error}", command.get_program().display()),
    )
}

struct Supervisor<'a> {
    holds: &'a [&'a dyn Hold],
    events: &'a Receiver<Event>,
    limits: Limits,
    group: &'a mut Group,
    terminal: Option<Terminal>,
    has_terminal: bool,
    child: Pid,
    /// Children of this program that the command has not started.
    known: Vec<Pid>,
    /// The exit code of the command.
    ended: Option<u8>,
    /// Whether this program has got SIGINT, and passed it on.
    has_passed_on_int: bool,
    /// Whether Ctrl-C has ended the command.
    is_interrupted: bool,
    /// Whether the command got HUP because it cannot get the terminal.
    is_hung_up: bool,
}

impl Supervisor<'_> {
    fn run(mut self) -> Outcome {
        loop {
            let wait = match set_deadline(self.holds, self.limits, self.group) {
                Ok(wait) => wait,
                Err(reason) => return self.end_lost(&reason),
            };
            if let Some(code) = self.ended {
                if code == KILLED && self.group.has_passed_deadline() {
                    let reason =
                        "leasehold was stopped until the validity of the lock had almost ended";
                    return self.end_lost(reason);
                }
                return self.end_rest(code);
            }
            if self.group.is_keeper_killed() {
                // Without the keeper, the command could outlive this program and its lock. If the whole group was
                // killed, the command ends, too.
                let until = time::now() + KEEPER_FIRST;
                while self.ended.is_none() && time::now() < until {
                    self.wait_for_children(until);
                }
                match self.ended {
                    Some(_) => continue,
                    None => return self.end_lost("the keeper of the command was killed"),
                }
            }
            // This loop looks for renewals several times per ttl, so the keeper learns of each in time even on a busy
            // machine.
            let wait = wait.min(self.limits.ttl / 3).min(LONGEST_WAIT);
            let Ok(event) = self.events.recv_timeout(wait) else {
                continue;
            };
            self.handle(&event);
        }
    }

    fn handle(&mut self, event: &Event) {
        match event {
            Event::Lost => {}
            Event::Signal(SIGCHLD) => self.reap(),
            Event::Signal(SIGTSTP) if job::can_stop() => self.suspend(),
            Event::Signal(SIGCONT) => self.resume(),
            Event::Signal(signal) if FORWARDED.contains(signal) => {
                self.has_passed_on_int |= *signal == SIGINT;
                if let Some(signal) = Signal::from_named_raw(*signal) {
                    self.signal(signal);
                }
            }
            Event::Signal(_) => {}
        }
    }

    /// Sends a signal to the whole group, and to the command if it has left the group.
    fn signal(&self, signal: Signal) {
        self.group.signal(signal);
        // The number belongs to the command until this program has collected its status.
        if self.ended.is_none() && !self.group.contains(self.child) {
            let _ = kill_process(self.child, signal);
        }
    }

    /// Sends a signal, and continues stopped processes, so that they receive it.
    fn end(&self, signal: Signal) {
        self.signal(signal);
        self.signal(Signal::CONT);
    }

    /// Collects children that have ended: the command, and processes that have lost their parent.
    fn reap(&mut self) {
        while let Some((id, status)) = self.group.reap() {
            if id != self.child {
                continue;
            }
            match status.stopping_signal() {
                Some(signal) => self.stopped(signal),
                None => self.ended(status),
            }
        }
    }

    fn ended(&mut self, status: WaitStatus) {
        self.ended = Some(code(status));
        self.is_interrupted = status.terminating_signal() == Some(SIGINT)
            && self.has_terminal
            && !self.has_passed_on_int;
    }

    /// Handles a stop of the command by this signal. TTIN and TTOU stop a command that uses the terminal from the
    /// background, TSTP is Ctrl-Z, and STOP comes from an operator or from a command that handles Ctrl-Z itself, such as a
    /// nested `leasehold run`. A STOP counts as Ctrl-Z in the foreground, and has no further effect in the background.
    fn stopped(&mut self, signal: i32) {
        let is_given = self.terminal.as_ref().is_some_and(Terminal::is_given);
        if matches!(signal, SIGTTIN | SIGTTOU) {
            if self.terminal.as_ref().is_some_and(Terminal::give) {
                self.has_terminal = true;
                self.signal(Signal::CONT);
            } else if job::group().is_some() && job::has_shell() {
                self.suspend();
            } else {
                self.hang_up();
            }
        } else if signal == SIGTSTP || is_given {
            match job::can_stop() {
                true => self.suspend(),
                false => self.signal(Signal::CONT),
            }
        }
    }

    /// Ends a command that needs the terminal while another job has it, if no shell could continue the command later.
    /// The kernel, too, sends HUP to a stopped group that no shell can continue.
    fn hang_up(&mut self) {
        // A command that ignores HUP uses the terminal, and stops, again.
        let (signal, name) = match self.is_hung_up {
            false => (Signal::HUP, "HUP"),
            true => (Signal::KILL, "KILL"),
        };
        self.is_hung_up = true;
        message(format_args!(
            "the command needs the terminal, which another job has, and no shell could continue the command later; the \
             command gets {name}"
        ));
        self.end(signal);
    }

    /// Stops the whole group, then this program, until this program is continued.
    fn suspend(&mut self) {
        self.signal(Signal::STOP);
        let was_foreground = self.take_terminal();
        self.has_terminal = false;
        terminal::stop(was_foreground);
        self.resume();
    }

    /// Continues the group if the locks are still held. Otherwise the group stays stopped, and the caller kills it
    /// next.
    fn resume(&mut self) {
        // The locks may have been lost while this program was stopped, so it asks Redis. If Redis does not reply, the
        // validity decides.
        let extended: Result<(), Error> = self
            .holds
            .iter()
            .try_for_each(|hold| hold.extend(self.limits.ttl));
        let is_lost = extended.is_err_and(|error| error.is_lease_lost());
        if is_lost || set_deadline(self.holds, self.limits, self.group).is_err() {
            return;
        }
        self.has_terminal = self.terminal.as_ref().is_some_and(Terminal::give_early);
        self.signal(Signal::CONT);
    }

    /// Called when the command has ended. Ends and reports the rest of its group, and reports processes that have left
    /// the group.
    fn end_rest(mut self, code: u8) -> Outcome {
        self.take_terminal();
        self.group.end_keeper();
        // Processes that have ended stay in the group until this program collects them.
        self.reap();
        if !self.group.is_empty() {
            for Child { id, name } in left::children(&self.known) {
                if self.group.contains(id) {
                    let id = id.as_raw_pid();
                    message(format_args!(
                        "process {id} ({name}) gets TERM, since the command has ended without it"
                    ));
                }
            }
            self.end(Signal::TERM);
            let kill_at = (time::now() + self.limits.grace).min(self.group.deadline());
            self.wait_until_empty(kill_at);
            match check(self.holds) {
                Ok(()) => {
                    self.group.signal(Signal::KILL);
                    self.wait_until_empty(time::now() + KILL_LIMIT);
                }
                Err(_) => self.kill(),
            }
        }
        for Child { id, name } in left::children(&self.known) {
            let id = id.as_raw_pid();
            message(format_args!(
                "process {id} ({name}) has left the group of the command, and runs on without the lock"
            ));
        }
        match self.is_interrupted {
            true => Outcome::Interrupted,
            false => Outcome::Exited(code),
        }
    }

    /// Called when the locks are lost, or about to be lost. Ends the group.
    fn end_lost(mut self, reason: &str) -> Outcome {
        let started = time::now();
        let kill_at = (started + self.limits.grace).min(self.group.deadline());
        if kill_at > started {
            self.end(Signal::TERM);
            while self.ended.is_none() && time::now() < kill_at {
                self.wait_for_children(kill_at);
            }
        }
        if self.ended.is_some() {
            // The rest of the group has the same time to end as the command.
            self.group.end_keeper();
            self.wait_until_empty(kill_at);
        }
        let has_terminal = self.take_terminal();
        self.kill();
        if let Some(terminal) = self.terminal.as_ref().filter(|_| has_terminal) {
            terminal.reset();
        }
        let took = time::now().saturating_sub(started);
        Outcome::Lost(format!(
            "{reason}; the command was ended within {} ms",
            took.as_millis()
        ))
    }

    /// Takes the terminal back. Returns false if the group did not have it.
    fn take_terminal(&mut self) -> bool {
        self.has_terminal && self.terminal.as_ref().is_some_and(Terminal::take)
    }

    /// Waits for an event, for [`POLL`] at most, and collects children that have ended.
    fn wait_for_children(&mut self, until: Duration) {
        let left = until.saturating_sub(time::now()).min(POLL);
        // The event does not matter, since the group is ending.
        let _ = self.events.recv_timeout(left);
        while let Some((id, status)) = self.group.reap() {
            if id == self.child && status.stopping_signal().is_none() {
                self.ended(status);
            }
        }
    }

    fn wait_until_empty(&mut self, until: Duration) {
        while !self.group.is_empty() && time::now() < until {
            self.wait_for_children(until);
        }
    }

    /// Kills the group, its keeper, and all processes that have left it. Waits until they have ended, for
    /// [`KILL_LIMIT`] at most.
    fn kill(&mut self) {
        self.group.signal(Signal::KILL);
        self.group.end_keeper();
        let until = time::now() + KILL_LIMIT;
        loop {
            self.wait_for_children(until);
            // This program finds only its own children. When it kills one, the children of that process become its own.
            let left = left::children(&self.known);
            for Child { id, .. } in &left {
                let _ = kill_process(*id, Signal::KILL);
            }
            if left.is_empty() && self.group.is_empty() {
                return;
            }
            if time::now() >= until {
                message(
                    "processes of the command have not ended after KILL. Those of another user, such as root by \
                     sudo, cannot be killed",
                );
                return;
            }
        }
    }
}

/// The exit code for the status of a command that has ended.
fn code(status: WaitStatus) -> u8 {
    if let Some(signal) = status.terminating_signal() {
        return signals::code(signal);
    }
    let code = status.exit_status().map(u8::try_from);
    code.and_then(Result::ok).unwrap_or(SYSTEM)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_has_its_whole_grace_before_the_validity_ends() {
        for (ttl, grace, margin) in [
            (30_000, 5_000, 1_000),
            (30_000, 12_000, 1_000),
            (10_000, 0, 50),
            (1_500, 500, 100),
            (1_000, 400, 80),
            (200, 66, 20),
        ] {
            let [ttl, grace, margin] = [ttl, grace, margin].map(Duration::from_millis);
            let limits = Limits { ttl, grace };
            let (term, kill) = limits.until_term_and_kill(ttl);
            assert_eq!((kill - term, ttl - kill), (grace, margin));
            assert!(term >= ttl / 2, "a failed renewal can be repeated");
        }
    }
}
