//! Receives signals on a thread.
//!
//! While the program waits for its lock, a fatal signal cancels the wait. While the command runs, the thread passes all
//! signals on as events.
//!
//! The program handles the signals and does not block them, because the command would inherit blocked signals. It
//! unblocks those that its caller has blocked.

use std::collections::HashSet;
use std::io;
use std::process;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use leasehold::crossbeam_channel::{Receiver, Sender, bounded, unbounded};
use nix::sys::signal::SigSet;
use rustix::process::{Signal, getpid, kill_process};
use signal_hook::consts::{
    SIGCHLD, SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGUSR1, SIGUSR2, SIGWINCH,
};

use crate::exit::SIGNALED;
use crate::job;

/// An event while the command runs.
#[derive(Debug)]
pub enum Event {
    /// This program got the signal with this number.
    Signal(i32),
    /// A lock was lost.
    Lost,
}

/// The signals that the program passes on to the command.
pub const FORWARDED: [i32; 7] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH];
/// The other signals that the program handles.
const OTHERS: [i32; 3] = [SIGCHLD, SIGCONT, SIGTSTP];
/// The signals that end the program while no command runs.
pub const FATAL: [i32; 4] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];

pub struct Signals {
    sender: Sender<Event>,
    events: Receiver<Event>,
    state: Arc<Mutex<State>>,
    cancelled: Receiver<()>,
}

struct State {
    phase: Phase,
    /// Its drop cancels the waits for locks.
    cancel: Option<Sender<()>>,
}

#[derive(Clone, Copy)]
enum Phase {
    /// The program waits for its lock.
    Waiting,
    /// A signal has cancelled the wait.
    Ended(i32),
    Running,
}

impl Signals {
    /// Starts the thread that receives the signals.
    pub fn start() -> io::Result<Self> {
        let ignored = ignored();
        let all = FORWARDED.into_iter().chain(OTHERS);
        // If CHLD stayed ignored, the system would not tell this program that the command has ended.
        let is_handled = |signal: &i32| *signal == SIGCHLD || !ignored.contains(signal);
        let handled: Vec<i32> = all.filter(is_handled).collect();
        let mut signals = signal_hook::iterator::Signals::new(&handled)?;
        unblock(&handled)?;
        let (sender, events) = unbounded();
        let (cancel, cancelled) = bounded(0);
        let state = Arc::new(Mutex::new(State {
            phase: Phase::Waiting,
            cancel: Some(cancel),
        }));
        let (of_thread, to_main) = (Arc::clone(&state), sender.clone());
        let receive = move || {
            for signal in signals.forever() {
                let mut state = lock(&of_thread);
                match state.phase {
                    Phase::Running => {
                        // The receiver lives as long as the program.
                        let _ = to_main.send(Event::Signal(signal));
                    }
                    Phase::Waiting if FATAL.contains(&signal) => {
                        state.phase = Phase::Ended(signal);
                        state.cancel = None;
                    }
                    // The cancelled wait may still wait for a reply. A second signal ends the program at once.
                    Phase::Ended(_) if FATAL.contains(&signal) => {
                        process::exit(code(signal).into())
                    }
                    _ if signal == SIGTSTP => {
                        drop(state);
                        if job::can_stop() {
                            let _ = kill_process(getpid(), Signal::STOP);
                        }
                    }
                    _ => {}
                }
            }
        };
        thread::Builder::new()
            .name("signals".to_owned())
            .spawn(receive)?;
        Ok(Self {
            sender,
            events,
            state,
            cancelled,
        })
    }

    /// Becomes ready when a signal, or the loss of a lock, ends the wait for the next lock.
    pub fn cancelled(&self) -> Receiver<()> {
        self.cancelled.clone()
    }

    /// The signal that has ended the wait.
    pub fn ended_by(&self) -> Option<i32> {
        match lock(&self.state).phase {
            Phase::Ended(signal) => Some(signal),
            _ => None,
        }
    }

    /// Makes the thread pass all signals on as events. Fails with the signal that ended the wait, if there was one.
    pub fn begin(&self) -> Result<&Receiver<Event>, i32> {
        let mut state = lock(&self.state);
        match state.phase {
            Phase::Ended(signal) => Err(signal),
            _ => {
                state.phase = Phase::Running;
                Ok(&self.events)
            }
        }
    }

    /// A function to call when a lock is lost. It sends an event, and ends the wait for a further lock.
    pub fn loss_reporter(&self) -> impl FnOnce() + Send + 'static {
        let (state, sender) = (Arc::clone(&self.state), self.sender.clone());
        move || {
            lock(&state).cancel = None;
            // The receiver is gone only if the command has ended.
            let _ = sender.send(Event::Lost);
        }
    }
}

fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Unblocks these signals for this thread, and for the threads that it starts.
pub fn unblock(signals: &[i32]) -> io::Result<()> {
    let mut set = SigSet::empty();
    for signal in signals {
        set.add((*signal).try_into()?);
    }
    Ok(set.thread_unblock()?)
}

/// The exit code of a program that a signal has ended.
pub fn code(signal: i32) -> u8 {
    SIGNALED.saturating_add(u8::try_from(signal).unwrap_or(0))
}

/// The signals that the caller of this program ignores, as `nohup` ignores HUP. The command ignores them, too.
fn ignored() -> HashSet<i32> {
    // Other systems do not report ignored signals.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    let mask = mask.unwrap_or(0);
    (1..=64)
        .filter(|signal| mask >> (signal - 1) & 1 == 1)
        .collect()
}
