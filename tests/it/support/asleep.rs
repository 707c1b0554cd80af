//! Threads that are seen to sleep, as who waits in a line of its client does: no server knows of
//! those. Where threads cannot be looked at, a guess has to do.

use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::thread;

use leasehold_testbed::eventually;

use super::{SOON, Task, millis};

impl<T: Send + 'static> Task<T> {
    /// Starts `work`, which is going to wait, and returns once it does.
    #[track_caller]
    pub fn start_and_see_asleep(work: impl FnOnce() -> T + Send + 'static) -> Self {
        let (sender, started) = channel();
        let task = Self::start(move || {
            let me = std::fs::read_link("/proc/thread-self").ok();
            sender.send(me).expect("it is waited for");
            work()
        });
        match started.recv().expect("the thread says so first") {
            Some(thread) => assert!(eventually(SOON, || is_asleep(&thread)), "it never waits"),
            None => thread::sleep(millis(200)),
        }
        task
    }
}

/// Also when it has ended already.
fn is_asleep(thread: &PathBuf) -> bool {
    let stat = Path::new("/proc").join(thread).join("stat");
    let Ok(stat) = std::fs::read_to_string(stat) else {
        return true;
    };
    // After the name, which stands in brackets and may itself hold brackets.
    let state = stat.rsplit(')').next().map(str::trim_start);
    state.is_some_and(|state| state.starts_with('S'))
}
