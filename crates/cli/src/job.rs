//! The job of this program: the process group, and the session, in which a shell has started it.
//!
//! A group or a session of another PID namespace has no number here: the system reports 0. `unshare --pid --fork` and
//! `nsenter` start such programs.

use std::io::{self, IsTerminal as _};

use nix::unistd::{self, Pid, getpgrp, getpid, getppid, getsid};

/// The number that the system reports for a group, a session or a parent of another PID namespace.
const ELSEWHERE: Pid = Pid::from_raw(0);

/// The process group of this program. `None` if the group belongs to another PID namespace.
pub fn group() -> Option<rustix::process::Pid> {
    rustix::process::Pid::from_raw(getpgrp().as_raw())
}

/// The process group of another process. `None` if the process has ended, or if the group belongs to another PID
/// namespace.
pub fn group_of(process: rustix::process::Pid) -> Option<rustix::process::Pid> {
    let group = unistd::getpgid(Some(Pid::from_raw(process.as_raw_pid())));
    rustix::process::Pid::from_raw(group.ok()?.as_raw())
}

/// Whether the signal of Ctrl-Z may stop this program. Without a terminal, another program has sent the signal, and can
/// also continue this one.
pub fn can_stop() -> bool {
    !io::stdin().is_terminal() || has_shell()
}

/// Whether the session of this program has a shell with job control. Without such a shell, no process would continue
/// this program after Ctrl-Z, and the kernel would not stop it, either. On systems other than Linux, this function
/// looks only at the parent.
pub fn has_shell() -> bool {
    let (group, session) = (getpgrp(), getsid(None));
    let mut ancestor = getppid();
    while ancestor != ELSEWHERE {
        if getsid(Some(ancestor)) != session {
            return false;
        }
        // A shell with job control gives each job a group of its own.
        if unistd::getpgid(Some(ancestor)) != Ok(group) || cfg!(not(target_os = "linux")) {
            return true;
        }
        ancestor = parent_of(ancestor).unwrap_or(ELSEWHERE);
    }
    // A session of another namespace may have its shell there. But the kernel never stops the first process of a
    // namespace.
    session == Ok(ELSEWHERE) && getpid().as_raw() != 1
}

/// The parent of a process, on Linux.
fn parent_of(process: Pid) -> Option<Pid> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).ok()?;
    // The name in parentheses may contain spaces. The state and the parent follow it.
    let (_, rest) = stat.rsplit_once(") ")?;
    rest.split(' ').nth(1)?.parse().ok().map(Pid::from_raw)
}
