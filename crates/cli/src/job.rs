//! The job of this program: the process group, and the session, in which a shell has started it.
//!
//! A group or a session of another PID namespace has no number here. The system then reports 0, as it does for a program
//! that was started from outside a container.

use std::io::{self, IsTerminal as _};

use nix::unistd::{Pid, getpgid, getpgrp, getpid, getppid, getsid};

/// The number of a group or a session, or the parent of a process, of another PID namespace.
const ELSEWHERE: Pid = Pid::from_raw(0);

/// The process group of this program. `None` if the group belongs to another PID namespace.
pub fn group() -> Option<rustix::process::Pid> {
    rustix::process::Pid::from_raw(getpgrp().as_raw())
}

/// Whether Ctrl-Z may stop this program. If its session has no shell with job control, no process would continue it, and
/// the kernel would not stop it, either. On systems other than Linux, this function looks only at the parent.
pub fn can_stop() -> bool {
    if !io::stdin().is_terminal() {
        return true;
    }
    let (group, session) = (getpgrp(), getsid(None));
    let mut ancestor = getppid();
    while ancestor != ELSEWHERE {
        if getsid(Some(ancestor)) != session {
            return false;
        }
        // A shell with job control gives each job a group of its own.
        if getpgid(Some(ancestor)) != Ok(group) || cfg!(not(target_os = "linux")) {
            return true;
        }
        ancestor = parent_of(ancestor).unwrap_or(ELSEWHERE);
    }
    // A session of another namespace may have a shell there. The kernel stops no first process of a namespace.
    session == Ok(ELSEWHERE) && getpid().as_raw() != 1
}

/// The parent of a process, on Linux.
fn parent_of(process: Pid) -> Option<Pid> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name in parentheses may contain spaces. The state and the parent follow it.
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(1)?.parse().ok().map(Pid::from_raw)
}
