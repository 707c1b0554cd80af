//! The loop of one thread or task under load: request, acquire, hold, release, and the time of the next
//! request.

use std::future::Future;
use std::thread;
use std::time::Duration;

use crate::machine::nanoseconds;
use crate::messages::{Round, Tally};
use crate::waits::Waits;

/// The lock of one thread or task. An implementation that blocks does so in the first poll of its future.
pub trait Locker: Send {
    /// Acquires the lock, holds it for `hold` and releases it. Returns the time at which the lock was acquired, in ns
    /// on the monotonic clock.
    fn pair(&mut self, hold: Duration) -> impl Future<Output = anyhow::Result<u64>> + Send;

    /// Lets `time` pass: blocks this thread, unless a task implements it otherwise.
    fn pause(&mut self, time: Duration) -> impl Future<Output = ()> + Send {
        async move { thread::sleep(time) }
    }
}

/// Reads the clock, then blocks this thread for `hold`. A [`Locker`] of a thread calls this when it has the lock.
pub fn hold(hold: Duration) -> u64 {
    let acquired = nanoseconds();
    if hold > Duration::ZERO {
        thread::sleep(hold);
    }
    acquired
}

/// Acquires and releases the lock for a round. `seat` is the thread's number among all threads of all processes.
///
/// A wait usually begins at the request. A round with a pace has two exceptions:
///
/// If the request is late because an earlier lock took too long, the wait begins at the time at which the request was
/// due. Otherwise a slow lock would be requested less often while it is slow (coordinated omission).
///
/// If the request is late because the system woke the thread late, the wait begins at the wake-up, since the lock did
/// not cause that delay.
///
/// # Errors
/// The first error of the lock, which ends the round.
pub async fn drive(
    locker: &mut impl Locker,
    hold: Duration,
    round: &Round,
    seat: usize,
) -> anyhow::Result<Tally> {
    let mut waits = Waits::new()?;
    let mut tally = Tally::default();
    let window = nanos(round.window);
    let end = round.start + window;
    pause_until(locker, round.start).await;
    for turn in 0.. {
        let asked = match meant(round, seat, turn) {
            None => nanoseconds(),
            Some(meant) if meant >= end => break,
            Some(_) if nanoseconds() >= end + window => {
                tally.left_out += 1;
                continue;
            }
            Some(meant) if pause_until(locker, meant).await => nanoseconds(),
            Some(meant) => meant,
        };
        if round.pace.is_none() && asked >= end {
            break;
        }
        let acquired = locker.pair(hold).await?;
        waits.record(Duration::from_nanos(acquired - asked))?;
        tally.pairs += 1;
        tally.in_time += u64::from(acquired < end);
    }
    (tally.least, tally.most) = (tally.pairs, tally.pairs);
    tally.waits = waits.to_steps();
    Ok(tally)
}

/// The time at which the thread's request number `turn` is due, if the round has a pace.
fn meant(round: &Round, seat: usize, turn: u64) -> Option<u64> {
    let pace = round.pace?;
    let interval = nanos(pace.interval);
    let first = interval * seat as u64 / pace.threads as u64;
    Some(round.start + first + turn * interval)
}

/// Pauses until `moment`. Returns false if that time had passed already.
async fn pause_until(locker: &mut impl Locker, moment: u64) -> bool {
    let left = moment.saturating_sub(nanoseconds());
    if left > 0 {
        locker.pause(Duration::from_nanos(left)).await;
    }
    left > 0
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use anyhow::Context as _;

    use super::*;
    use crate::messages::Pace;
    use crate::serve::at_once;

    /// A lock that stalls once, for the time of many turns.
    struct Stalling {
        stall: Option<Duration>,
        taken: u64,
    }

    impl Locker for Stalling {
        async fn pair(&mut self, time: Duration) -> anyhow::Result<u64> {
            self.taken += 1;
            if let Some(stall) = self.stall.take() {
                thread::sleep(stall);
            }
            Ok(hold(time))
        }
    }

    fn driven(window: u64, stall: u64, interval: Option<u64>) -> anyhow::Result<(Tally, Waits)> {
        let round = Round {
            start: nanoseconds(),
            window: Duration::from_millis(window),
            pace: interval.map(|interval| Pace {
                interval: Duration::from_millis(interval),
                threads: 1,
            }),
        };
        let mut locker = Stalling {
            stall: Some(Duration::from_millis(stall)),
            taken: 0,
        };
        let tally = at_once(drive(&mut locker, Duration::ZERO, &round, 0))?;
        assert_eq!(locker.taken, tally.pairs);
        let mut waits = Waits::new()?;
        waits.add(&tally.waits)?;
        Ok((tally, waits))
    }

    #[test]
    fn a_stall_counts_for_every_thread_due_meanwhile() -> anyhow::Result<()> {
        // On a busy machine, the thread may stall for longer than it should.
        let (tally, waits) = (0..20)
            .map(|_| driven(100, 60, Some(1)))
            .find(|driven| {
                driven
                    .as_ref()
                    .map_or(true, |(tally, _)| tally.left_out == 0)
            })
            .context("each run left turns out")??;
        assert_eq!(tally.pairs, 100);
        // Sixty requests were due during the stall. The middle one of them has waited for half of the stall.
        let median_of_the_late = waits.quantile(0.7);
        let half = Duration::from_millis(25);
        assert!(median_of_the_late >= Some(half), "{median_of_the_late:?}");
        Ok(())
    }

    #[test]
    fn a_pace_too_fast_skips_turns_and_ends() -> anyhow::Result<()> {
        let (tally, _) = driven(20, 60, Some(1))?;
        assert_eq!((tally.pairs, tally.left_out), (1, 19));
        Ok(())
    }

    #[test]
    fn unpaced_threads_stop_in_stalls_and_at_end() -> anyhow::Result<()> {
        let (tally, waits) = driven(20, 60, None)?;
        assert_eq!((tally.pairs, tally.in_time), (1, 0));
        assert_eq!(waits.times(), 1);
        Ok(())
    }

    #[test]
    fn the_turns_of_all_threads_are_spread_evenly() {
        let pace = Pace {
            interval: Duration::from_nanos(400),
            threads: 4,
        };
        let round = Round {
            start: 1000,
            window: Duration::ZERO,
            pace: Some(pace),
        };
        let turns = |seat| [0, 1].map(|turn| meant(&round, seat, turn));
        assert_eq!(turns(0), [Some(1000), Some(1400)]);
        assert_eq!(turns(3), [Some(1300), Some(1700)]);
    }
}
