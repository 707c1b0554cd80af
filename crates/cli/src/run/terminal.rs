//! The terminal, if the program has one on its standard input. While the program is in the foreground, it gives the
//! terminal to the group of the command, as a shell does for its jobs.

use std::fs::File;
use std::io::{self, IsTerminal as _, Stdin};
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileTypeExt as _;
use std::thread;

use nix::sys::signal::SigSet;
use rustix::process::{Pid, Signal, getpid, kill_current_process_group, kill_process};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr, tcsetpgrp};

use crate::job;

/// The terminal on standard input, and the group of the command.
pub struct Terminal {
    stdin: Stdin,
    group: Pid,
    /// Whether another program of the job, such as `less`, reads the output of the command, and may use the terminal.
    is_shared: bool,
    /// The settings of the terminal before the command started.
    settings: Option<Termios>,
}

impl Terminal {
    pub fn find(group: Pid) -> Option<Self> {
        let stdin = io::stdin();
        stdin.is_terminal().then(|| Self {
            stdin,
            group,
            is_shared: is_pipe(&io::stdout()),
            settings: tcgetattr(io::stdin()).ok(),
        })
    }

    /// Gives the terminal to the group before the group uses it. Does nothing, and returns false, if the terminal is shared.
    pub fn give_early(&self) -> bool {
        !self.is_shared && self.give()
    }

    /// Gives the terminal to the group if this program is in the foreground. Returns whether the group has it now.
    pub fn give(&self) -> bool {
        let Ok(foreground) = tcgetpgrp(&self.stdin) else {
            return false;
        };
        foreground == self.group
            || Some(foreground) == job::group() && tcsetpgrp(&self.stdin, self.group).is_ok()
    }

    /// Whether the group has the terminal.
    pub fn is_given(&self) -> bool {
        tcgetpgrp(&self.stdin) == Ok(self.group)
    }

    /// Takes the terminal back. Returns false if the group did not have it.
    pub fn take(&self) -> bool {
        if !self.is_given() {
            return false;
        }
        // From the background, the call raises SIGTTOU unless its thread blocks this signal. A separate thread blocks
        // it, since a command inherits the blocked signals of the thread that starts it.
        let take = || {
            let mut background: SigSet = SigSet::empty();
            background.add(nix::sys::signal::Signal::SIGTTOU);
            background.thread_block().is_ok()
                && job::group().is_some_and(|own| tcsetpgrp(&self.stdin, own).is_ok())
        };
        thread::scope(|scope| scope.spawn(take).join().unwrap_or(false))
    }

    /// Restores the settings of the terminal, which this program must have. A killed editor leaves changed settings behind.
    pub fn reset(&self) {
        if let Some(settings) = &self.settings {
            let _ = tcsetattr(&self.stdin, OptionalActions::Now, settings);
        }
    }
}

fn is_pipe(output: &io::Stdout) -> bool {
    let output = output.as_fd().try_clone_to_owned();
    let kind = output.and_then(|output| File::from(output).metadata());
    kind.is_ok_and(|kind| kind.file_type().is_fifo())
}

/// Ends this program by SIGINT, after Ctrl-C has ended the command. Ctrl-C reached only the group of the command, which
/// had the terminal. So this function first sends SIGINT to the rest of the job, such as a shell script.
pub fn interrupt() {
    // This program is in the job, too, but handles the signal.
    let _ = kill_current_process_group(Signal::INT);
    let _ = signal_hook::low_level::emulate_default_handler(signal_hook::consts::SIGINT);
}

/// Stops this program until it is continued. In the foreground, stops the whole job, as Ctrl-Z does.
pub fn stop(is_foreground: bool) {
    // The call returns when the program is continued.
    let _ = match is_foreground {
        true => kill_current_process_group(Signal::STOP),
        false => kill_process(getpid(), Signal::STOP),
    };
}
