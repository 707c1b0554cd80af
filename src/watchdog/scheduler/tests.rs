use super::*;

const SECOND: Duration = Duration::from_secs(1);

#[test]
fn when_very_many_timers_are_due_the_first_are_returned_before_the_last_are_gathered() {
    let clock = Clock::movable();
    let (scheduler, _inboxes) = Scheduler::new(clock.clone());
    let start = scheduler.now();
    let all = 3 * AT_ONCE;
    for n in 0..all {
        let later = Duration::from_millis(n as u64 % 1000);
        scheduler
            .set(start.after(later), Timer::Maintenance)
            .unwrap();
    }
    clock.advance(2 * SECOND);
    let mut looks = Vec::new();
    while looks.iter().sum::<usize>() < all {
        looks.push(scheduler.next().unwrap().len());
    }
    // A tick is not taken apart.
    let most = AT_ONCE + all / 1000 + 1;
    assert!(looks.iter().all(|due| *due <= most), "{looks:?}");
    assert!(looks.len() <= 4, "{looks:?}");
}
