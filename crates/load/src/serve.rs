//! The work of a load process: it connects as assigned, then runs the rounds that its parent orders, by the
//! protocol of `leasehold_testbed::child`.

use std::future::Future;
use std::pin::pin;
use std::process::ExitCode;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use anyhow::anyhow;
use crossbeam_channel::Receiver;
use leasehold_testbed::child::{self, say};

use crate::drive::{Locker, drive};
use crate::machine;
use crate::messages::{Assignment, Round, Tally};
use crate::waits::Waits;

/// Runs one round with all threads or tasks of a process, which are connected. Returns a tally for each of them.
pub type RunRound = Box<dyn FnMut(Round) -> anyhow::Result<Vec<Tally>>>;

/// Carries out the orders on its input until the input ends. Reports a failure to the parent, and then ends the
/// process.
pub fn serve(connect: impl FnOnce(&Assignment) -> anyhow::Result<RunRound>) -> ExitCode {
    child::run(|assignment: Assignment, rounds: Receiver<Round>| {
        if let Some(core) = assignment.core {
            machine::pin(std::process::id(), core)?;
        }
        let mut run_round = connect(&assignment)?;
        say(&Tally::default())?;
        for round in rounds {
            let before = machine::own_cpu();
            let mut tally = sum(&run_round(round)?)?;
            tally.cpu = machine::own_cpu().saturating_sub(before);
            say(&tally)?;
        }
        Ok(())
    })
}

/// The sum of all tallies.
///
/// # Errors
/// A wait cannot be recorded.
pub fn sum(tallies: &[Tally]) -> anyhow::Result<Tally> {
    let mut waits = Waits::new()?;
    let mut sum = Tally::default();
    for tally in tallies {
        sum.pairs += tally.pairs;
        sum.in_time += tally.in_time;
        sum.left_out += tally.left_out;
        sum.cpu += tally.cpu;
        waits.add(&tally.waits)?;
    }
    sum.least = tallies.iter().map(|tally| tally.least).min().unwrap_or(0);
    sum.most = tallies.iter().map(|tally| tally.most).max().unwrap_or(0);
    sum.waits = waits.to_steps();
    Ok(sum)
}

/// Runs one thread for each locker.
pub fn threads<L: Locker + 'static>(
    mut lockers: Vec<L>,
    first_seat: usize,
    hold: Duration,
) -> RunRound {
    Box::new(move |round| {
        thread::scope(|scope| {
            let running: Vec<_> = lockers
                .iter_mut()
                .zip(first_seat..)
                .map(|(locker, seat)| {
                    scope.spawn(move || at_once(drive(locker, hold, &round, seat)))
                })
                .collect();
            let ended = running.into_iter().map(|thread| thread.join());
            ended
                .map(|outcome| outcome.map_err(|_| anyhow!("a thread panicked"))?)
                .collect()
        })
    })
}

/// Returns the result of a future that blocks in its first poll.
pub(crate) fn at_once<T>(work: impl Future<Output = T>) -> T {
    let mut work = pin!(work);
    match work.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(outcome) => outcome,
        Poll::Pending => unreachable!("lockers of threads block"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tallies_of_threads_add_up() -> anyhow::Result<()> {
        let tally = |pairs, wait| Tally {
            pairs,
            in_time: pairs - 1,
            left_out: 1,
            least: pairs,
            most: pairs,
            waits: vec![(wait, pairs)],
            cpu: Duration::from_millis(pairs),
        };
        let all = sum(&[tally(3, 10), tally(5, 10), tally(4, 20)])?;
        assert_eq!((all.pairs, all.in_time, all.left_out), (12, 9, 3));
        assert_eq!((all.least, all.most), (3, 5));
        assert_eq!(all.waits, [(10, 8), (20, 4)]);
        assert_eq!(all.cpu, Duration::from_millis(12));
        Ok(())
    }
}
