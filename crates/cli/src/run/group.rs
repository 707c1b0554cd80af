//! The process group of the command: the keeper, the command, and processes that the command has started.

use std::ffi::OsStr;
use std::io::{self, Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{
    Pid, Signal, WaitOptions, WaitStatus, kill_process_group, test_kill_process_group, wait,
};

use crate::job;
use crate::run::keeper;
use crate::time;

/// A process group with its keeper.
pub struct Group {
    id: Pid,
    keeper: Child,
    /// The pipe to the keeper. `None` once the keeper has ended.
    pipe: Option<ChildStdin>,
    deadline: Duration,
    is_keeper_killed: bool,
    /// Set if this program sent a deadline only after the previous one had passed.
    has_passed_deadline: bool,
}

impl Group {
    /// Starts the keeper, without waiting until it is ready.
    pub fn start() -> io::Result<Self> {
        let mut keeper = Command::new(std::env::current_exe()?)
            .arg0(OsStr::from_bytes(keeper::PROCESS_NAME.to_bytes()))
            .arg(keeper::NAME)
            .env_clear()
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()?;
        Ok(Self {
            id: Pid::from_child(&keeper),
            pipe: keeper.stdin.take(),
            keeper,
            deadline: Duration::ZERO,
            is_keeper_killed: false,
            has_passed_deadline: false,
        })
    }

    /// The number of the group, which is that of its keeper.
    pub fn id(&self) -> Pid {
        self.id
    }

    /// Starts the command in this group. First waits until the keeper is ready: from then on, only KILL and STOP can
    /// reach the keeper.
    pub fn spawn(&mut self, command: &mut Command) -> io::Result<Pid> {
        if let Some(mut ready) = self.keeper.stdout.take() {
            ready.read_exact(&mut [0])?;
        }
        let child = command.process_group(self.id.as_raw_pid()).spawn()?;
        // `reap` collects the status of the command.
        Ok(Pid::from_child(&child))
    }

    /// Tells the keeper when to kill the group.
    pub fn set_deadline(&mut self, deadline: Duration) {
        if let Some(pipe) = &mut self.pipe
            && deadline != self.deadline
        {
            self.has_passed_deadline |= !self.deadline.is_zero() && time::now() >= self.deadline;
            self.deadline = deadline;
            // This fails only if the keeper has died.
            let _ = pipe.write_all(&keeper::message(deadline));
        }
    }

    /// The last deadline that the keeper was told.
    pub fn deadline(&self) -> Duration {
        self.deadline
    }

    /// Whether a deadline has passed at some time, so that the keeper has killed the group.
    pub fn has_passed_deadline(&self) -> bool {
        self.has_passed_deadline || time::now() >= self.deadline
    }

    /// Whether a process is in this group.
    pub fn contains(&self, process: Pid) -> bool {
        job::group_of(process) == Some(self.id)
    }

    /// Sends a signal to the whole group, which may be empty.
    pub fn signal(&self, signal: Signal) {
        let _ = kill_process_group(self.id, signal);
    }

    /// Ends the keeper, so that only processes of the command are left in the group.
    pub fn end_keeper(&mut self) {
        if self.pipe.is_none() {
            return;
        }
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
        // The pipe closes only now: at its end, a running keeper would kill the group.
        self.pipe = None;
    }

    /// Whether the keeper has ended, and not by [`end_keeper`](Self::end_keeper): it has killed the group, or another
    /// program has killed the keeper.
    pub fn is_keeper_killed(&self) -> bool {
        self.is_keeper_killed
    }

    /// Whether the group has no process. Call [`end_keeper`](Self::end_keeper) before.
    pub fn is_empty(&self) -> bool {
        // Any other error means that there are processes of another user.
        test_kill_process_group(self.id) == Err(Errno::SRCH)
    }

    /// The next child of this process that has ended or stopped.
    pub fn reap(&mut self) -> Option<(Pid, WaitStatus)> {
        let reaped = wait(WaitOptions::NOHANG | WaitOptions::UNTRACED);
        let (id, status) = reaped.ok().flatten()?;
        if id == self.id && status.stopping_signal().is_none() {
            // The system may give the number to another process now.
            self.pipe = None;
            self.is_keeper_killed = true;
        }
        Some((id, status))
    }
}

impl Drop for Group {
    /// Kills the keeper and all other processes of the group.
    fn drop(&mut self) {
        if self.pipe.take().is_some() {
            self.signal(Signal::KILL);
            let _ = self.keeper.wait();
        }
    }
}
