//! Scene one: a counter raised by read-then-write from many threads of several processes, without
//! the lock and with it. Counts what was raised, never trusts the lock's own word.

use std::time::Duration;

use anyhow::{bail, ensure};

use super::PATIENCE;
use super::actor::Actor;
use super::messages::{Job, Message, Order, Raise, Tally};
use super::report::{self, Run};
use crate::progress;
use crate::space::Space;
use crate::stop::Stop;

const PROCESSES: usize = 4;
const THREADS: usize = 8;
const LOCK: &str = "counter";

pub fn show(space: &Space, time: Duration, stop: &Stop) -> anyhow::Result<()> {
    println!(
        "\n1. {PROCESSES} processes of {THREADS} threads raise one counter: read it, write it back \
         plus one.\n   {time:?} without a lock, then {time:?} with one."
    );
    let without = run(space, "without", None, time, stop)?;
    println!("   without: {}", without.verdict());
    let with = run(space, "with", Some(LOCK.to_owned()), time, stop)?;
    println!("   with:    {}", with.verdict());
    print!("{}", report::table(&without, &with)?);

    ensure!(
        without.lost() > 0,
        "no update was lost without a lock, so nothing was shown: try more --seconds"
    );
    ensure!(with.made() > 0, "nothing was raised with the lock");
    let wrong = with.made().abs_diff(with.counted);
    ensure!(
        wrong == 0,
        "the lock did not exclude: {} raises were made in it, the counter says {}",
        with.made(),
        with.counted
    );
    let out_of_order: u64 = with.tallies.iter().map(|tally| tally.out_of_order).sum();
    ensure!(
        out_of_order == 0,
        "{out_of_order} grants had a fencing token that was not above the one before it"
    );
    println!(
        "   Fencing tokens rose with every one of the {} grants.",
        with.made()
    );
    Ok(())
}

fn run(
    space: &Space,
    name: &str,
    lock: Option<String>,
    time: Duration,
    stop: &Stop,
) -> anyhow::Result<Run> {
    let raise = Raise {
        counter: space.value_key(&format!("{name}:count")),
        last_token: space.value_key(&format!("{name}:token")),
        lock,
        threads: THREADS,
        time,
    };
    let mut processes = (1..=PROCESSES)
        .map(|n| Actor::start(format!("process {n}"), space, Job::Raise(raise.clone())))
        .collect::<anyhow::Result<Vec<_>>>()?;
    for process in &processes {
        match stop.message(&process.0, PATIENCE)? {
            Message::Ready => {}
            other => bail!(process.0.unexpected("Ready", &other)),
        }
    }
    for process in &mut processes {
        process.0.order(&Order::Go)?;
    }
    let bar = progress::bar_of_time(time, "counter: {msg}")?;
    let counted = || Ok(count(space, &raise.counter)?.to_string());
    progress::pass(time, &bar, stop, counted)?;
    bar.finish_and_clear();
    let tallies = processes
        .iter()
        .map(|process| match stop.message(&process.0, PATIENCE)? {
            Message::Raised(tally) => Ok(tally),
            other => Err(process.0.unexpected("Raised", &other)),
        })
        .collect::<anyhow::Result<Vec<Tally>>>()?;
    let counted = count(space, &raise.counter)?;
    Ok(Run { tallies, counted })
}

fn count(space: &Space, counter: &str) -> anyhow::Result<u64> {
    let count: Option<u64> = space.ask(redis::cmd("GET").arg(counter))?;
    Ok(count.unwrap_or(0))
}
