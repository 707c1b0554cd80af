//! Threads that wait in their client's local queue, which a server cannot see: the test checks that they sleep. Where
//! the system does not show a thread's state, the test waits a moment instead.

use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::thread;

use leasehold_testbed::eventually;

use super::{SOON, Task, millis};

impl<T: Send + 'static> Task<T> {
    /// Starts `work`, which is going to wait, and returns once it waits.
    #[track_caller]
    pub fn start_blocked(work: impl FnOnce() -> T + Send + 'static) -> Self {
        let (sender, started) = channel();
        let task = Self::start(move || {
            let me = std::fs::read_link("/proc/thread-self").ok();
            sender.send(me).expect("the test waits for it");
            work()
        });
        match started.recv().expect("the thread sends its id first") {
            Some(thread) => assert!(eventually(SOON, || is_asleep(&thread)), "it never waits"),
            None => thread::sleep(millis(200)),
        }
        task
    }
}

/// Whether the thread sleeps, or has ended.
fn is_asleep(thread: &PathBuf) -> bool {
    let stat = Path::new("/proc").join(thread).join("stat");
    let Ok(stat) = std::fs::read_to_string(stat) else {
        return true;
    };
    // The state comes after the name, which stands in brackets and may contain brackets.
    let state = stat.rsplit(')').next().map(str::trim_start);
    state.is_some_and(|state| state.starts_with('S'))
}
