use super::*;
use crate::config::key::Key;
use crate::lease::{CallbackExecutor, Grant};
use crate::process::threads::ThreadGroup;

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn very_many_due_timers_are_returned_in_parts() {
    let clock = Clock::movable();
    let scheduler = Scheduler::new(clock.clone());
    let start = scheduler.now();
    let callbacks = CallbackExecutor::start(&ThreadGroup::new(), None).unwrap();
    let grant = Grant::usual(Key::new("", "k", 16).unwrap(), start);
    let lease = Arc::new(Lease::new(grant, callbacks, None));
    let all = 3 * MAX_DUE_TIMERS;
    for n in 0..all {
        let later = Duration::from_millis(n as u64 % 1000);
        scheduler
            .set_timer(start.after(later), Arc::clone(&lease))
            .unwrap();
    }
    clock.advance(2 * SECOND);
    let mut parts = Vec::new();
    while parts.iter().sum::<usize>() < all {
        parts.push(scheduler.wait_for_due_timers().unwrap().len());
    }
    // All timers of one tick are returned together.
    let most = MAX_DUE_TIMERS + all / 1000 + 1;
    assert!(parts.iter().all(|due| *due <= most), "{parts:?}");
    assert!(parts.len() <= 4, "{parts:?}");
}
