//! A load process's side of the talk: it reads its assignment and rounds on its input, answers on its
//! output, and ends when its input ends, so none is left behind whatever becomes of the parent.

use std::future::Future;
use std::io::{self, Write as _};
use std::pin::pin;
use std::process::ExitCode;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use serde::Serialize;

use crate::drive::{Locker, drive};
use crate::machine;
use crate::messages::{Assignment, Round, Tally};
use crate::waits::Waits;

/// All threads or tasks of a process, connected: does a round, and tells what each of them did.
pub type Crew = Box<dyn FnMut(Round) -> anyhow::Result<Vec<Tally>>>;

/// Does what it is told on its input until that ends. A failure is told, and ends it.
pub fn serve(connect: impl FnOnce(&Assignment) -> anyhow::Result<Crew>) -> ExitCode {
    match work(connect) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Without a parent there is nobody left to tell.
            let _ = say(&Err::<Tally, _>(format!("{error:#}")));
            ExitCode::FAILURE
        }
    }
}

fn work(connect: impl FnOnce(&Assignment) -> anyhow::Result<Crew>) -> anyhow::Result<()> {
    let mut lines = io::stdin().lines();
    let first = lines.next().context("nothing was said")??;
    let assignment: Assignment =
        serde_json::from_str(&first).context("this is for `cargo xtask bench` only")?;
    if let Some(core) = assignment.core {
        machine::pin(std::process::id(), core)?;
    }
    let mut crew = connect(&assignment)?;
    say(&Ok::<_, String>(Tally::default()))?;
    for line in lines {
        let round: Round = serde_json::from_str(&line?)?;
        let before = machine::own_cpu();
        let mut tally = sum(&crew(round)?)?;
        tally.cpu = machine::own_cpu().saturating_sub(before);
        say(&Ok::<_, String>(tally))?;
    }
    Ok(())
}

fn say(message: &impl Serialize) -> anyhow::Result<()> {
    let mut line = serde_json::to_string(message)?;
    line.push('\n');
    let mut output = io::stdout().lock();
    output.write_all(line.as_bytes())?;
    Ok(output.flush()?)
}

/// What all of them did together.
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
        waits.add(tally)?;
    }
    sum.least = tallies.iter().map(|tally| tally.least).min().unwrap_or(0);
    sum.most = tallies.iter().map(|tally| tally.most).max().unwrap_or(0);
    sum.waits = waits.to_steps();
    Ok(sum)
}

/// A crew of threads, one for each locker.
pub fn threads<L: Locker + 'static>(
    mut lockers: Vec<L>,
    first_seat: usize,
    hold: Duration,
) -> Crew {
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

/// The outcome of something that blocks where it would wait.
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
    fn together_they_did_what_each_did() -> anyhow::Result<()> {
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
