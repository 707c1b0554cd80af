//! The keeper: a small process that kills the command's process group if `leasehold` cannot do so itself.
//!
//! The keeper leads the group of the command. So the group exists before the command starts, and the system gives the
//! number of the group to no other group while `leasehold` needs it. The keeper's standard input is a pipe from
//! `leasehold`, which sends the deadline of the locks: the time of `time::CLOCK` in ns, in 8 bytes. The keeper kills its
//! group
//!
//! - when the pipe ends, because `leasehold` has died, and
//! - at the deadline, because `leasehold` is stopped or stuck.

use std::ffi::CStr;
use std::io::{self, Read as _, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use nix::sys::signal::SigSet;
use rustix::process::{Signal, getpid, kill_current_process_group};

use crate::exit::SYSTEM;
use crate::job;

/// The first argument of the keeper.
pub const NAME: &str = "__keeper";
/// The name of the process. It differs from that of this program: `pkill -KILL leasehold` kills `leasehold`, and the
/// keeper then kills the group.
pub const PROCESS_NAME: &CStr = c"lock-keeper";

/// Runs the keeper. Writes one byte when only KILL and STOP can still reach it.
pub fn main() -> ExitCode {
    // If a user has started the keeper by hand in a shell, it must not kill the group of the shell.
    let is_leader = job::group() == Some(getpid());
    // Linux names a process after the program's file.
    #[cfg(target_os = "linux")]
    let _ = rustix::thread::set_name(PROCESS_NAME);
    let is_ready = is_leader
        && SigSet::all().thread_block().is_ok()
        && io::stdout().write_all(b"k").is_ok()
        && io::stdout().flush().is_ok();
    if !is_ready {
        return ExitCode::from(SYSTEM);
    }
    keep();
    // This also kills the keeper.
    let _ = kill_current_process_group(Signal::KILL);
    ExitCode::from(SYSTEM)
}

/// Returns when the pipe has ended, or the deadline has passed.
fn keep() {
    let mut stdin = io::stdin().lock();
    let Ok(mut timer) = timer::Timer::new() else {
        return;
    };
    let mut deadline = None;
    loop {
        match timer.wait(&stdin, deadline) {
            Ok(true) => {}
            Ok(false) | Err(_) => return,
        }
        let mut message = [0; 8];
        if stdin.read_exact(&mut message).is_err() {
            return;
        }
        deadline = Some(Duration::from_nanos(u64::from_le_bytes(message)));
    }
}

/// Encodes a deadline for the pipe.
pub fn message(deadline: Duration) -> [u8; 8] {
    u64::try_from(deadline.as_nanos())
        .unwrap_or(u64::MAX)
        .to_le_bytes()
}

/// A timer whose clock also runs while the machine sleeps.
#[cfg(target_os = "linux")]
mod timer {
    use std::io;
    use std::os::fd::{AsFd, OwnedFd};
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    };

    pub struct Timer(OwnedFd);

    impl Timer {
        pub fn new() -> io::Result<Self> {
            Ok(Self(timerfd_create(
                TimerfdClockId::Boottime,
                TimerfdFlags::CLOEXEC,
            )?))
        }

        /// Waits for `input`. Returns false at the deadline.
        pub fn wait(&mut self, input: &impl AsFd, deadline: Option<Duration>) -> io::Result<bool> {
            let zero = Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            if let Some(deadline) = deadline {
                let at = Timespec {
                    tv_sec: i64::try_from(deadline.as_secs()).unwrap_or(i64::MAX),
                    // A time of zero would switch the timer off.
                    tv_nsec: deadline.subsec_nanos().max(1).into(),
                };
                let at = Itimerspec {
                    it_interval: zero,
                    it_value: at,
                };
                timerfd_settime(&self.0, TimerfdTimerFlags::ABSTIME, &at)?;
            }
            let mut ready = [
                PollFd::new(input, PollFlags::IN),
                PollFd::new(&self.0, PollFlags::IN),
            ];
            poll(&mut ready, None)?;
            // If a new deadline arrives when the old one passes, the new one counts.
            Ok(!ready[0].revents().is_empty())
        }
    }
}

/// A timer that sleeps in short steps. The timers of these systems stop while the machine sleeps.
#[cfg(not(target_os = "linux"))]
mod timer {
    use std::io;
    use std::os::fd::AsFd;
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::time::Timespec;

    use crate::time;

    const STEP: Duration = Duration::from_millis(500);

    pub struct Timer;

    impl Timer {
        pub fn new() -> io::Result<Self> {
            Ok(Self)
        }

        /// Waits for `input`. Returns false at the deadline.
        pub fn wait(&mut self, input: &impl AsFd, deadline: Option<Duration>) -> io::Result<bool> {
            loop {
                let left = deadline.map(|deadline| deadline.saturating_sub(time::now()));
                if left == Some(Duration::ZERO) {
                    return Ok(false);
                }
                let left = left.map(|left| left.min(STEP));
                let left = left.map(|left| Timespec {
                    tv_sec: left.as_secs() as i64,
                    tv_nsec: left.subsec_nanos().into(),
                });
                let mut ready = [PollFd::new(input, PollFlags::IN)];
                if poll(&mut ready, left.as_ref())? > 0 {
                    return Ok(true);
                }
            }
        }
    }
}
