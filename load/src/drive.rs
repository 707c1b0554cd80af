//! The loop of one thread or task under load: ask, have, hold, let go, and when to ask again.

use std::future::Future;
use std::time::Duration;

use crate::machine::nanoseconds;
use crate::messages::{Round, Tally};
use crate::waits::Waits;

/// One thread's way to its lock. What blocks does so within its first poll.
pub trait Locker: Send {
    /// Returns with the lock.
    fn take(&mut self) -> impl Future<Output = anyhow::Result<()>> + Send;

    /// Lets it go.
    fn give(&mut self) -> impl Future<Output = anyhow::Result<()>> + Send;

    /// Lets time pass.
    fn pause(&mut self, time: Duration) -> impl Future<Output = ()> + Send;
}

/// Takes and gives the lock for a round; `seat` is the thread's number among all of its crew.
///
/// A wait counts from the moment of asking. In a round with a pace that is the moment that was meant,
/// if an earlier lock took until after it: else whoever is slow would be asked less while it is slow
/// (coordinated omission). Woken late by the system alone, the thread counts from when it woke: the
/// lateness of its own timer is nobody's lock.
///
/// # Errors
/// The lock's own; the first ends the round.
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
        locker.take().await?;
        let had = nanoseconds();
        waits.record(Duration::from_nanos(had - asked))?;
        tally.pairs += 1;
        tally.in_time += u64::from(had < end);
        if hold > Duration::ZERO {
            locker.pause(hold).await;
        }
        locker.give().await?;
    }
    (tally.least, tally.most) = (tally.pairs, tally.pairs);
    tally.waits = waits.to_steps();
    Ok(tally)
}

/// When a thread is to ask for the `turn`-th time, if its round has a pace.
fn meant(round: &Round, seat: usize, turn: u64) -> Option<u64> {
    let pace = round.pace?;
    let interval = nanos(pace.interval);
    let first = interval * seat as u64 / pace.threads as u64;
    Some(round.start + first + turn * interval)
}

/// Whether there was anything to wait for.
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
    use super::*;
    use crate::messages::Pace;
    use crate::serve::at_once;

    /// Stalls once, long enough for many turns to pass.
    struct Stalling {
        stall: Option<Duration>,
        taken: u64,
    }

    impl Locker for Stalling {
        async fn take(&mut self) -> anyhow::Result<()> {
            self.taken += 1;
            if let Some(stall) = self.stall.take() {
                std::thread::sleep(stall);
            }
            Ok(())
        }

        async fn give(&mut self) -> anyhow::Result<()> {
            Ok(())
        }

        async fn pause(&mut self, time: Duration) {
            std::thread::sleep(time);
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
    fn a_stall_is_counted_by_everyone_who_was_to_ask_meanwhile() -> anyhow::Result<()> {
        let (tally, waits) = driven(100, 60, Some(1))?;
        assert_eq!((tally.pairs, tally.left_out), (100, 0));
        // Sixty were to ask during the stall; the middle one of them waited for half of it.
        let median_of_the_late = waits.quantile(0.7);
        let half = Duration::from_millis(25);
        assert!(median_of_the_late >= Some(half), "{median_of_the_late:?}");
        Ok(())
    }

    #[test]
    fn a_pace_that_cannot_be_kept_leaves_turns_out_and_ends() -> anyhow::Result<()> {
        let (tally, _) = driven(20, 60, Some(1))?;
        assert_eq!((tally.pairs, tally.left_out), (1, 19));
        Ok(())
    }

    #[test]
    fn without_a_pace_nobody_asks_during_a_stall_or_after_the_end() -> anyhow::Result<()> {
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
