//! Scene one: many threads of several processes increment a counter by reading and writing it, first without the lock
//! and then with it. The processes count their increments, so the check does not rely on the lock.

use std::time::Duration;

use anyhow::{bail, ensure};
use leasehold_tools::environment::Namespace;
use leasehold_tools::progress;
use leasehold_tools::stop::Stop;

use crate::STEP_LIMIT;
use crate::actor::Actor;
use crate::messages::{Increment, Job, Message, Order, Tally};
use crate::report::{self, Run};

const PROCESSES: usize = 4;
const THREADS: usize = 8;
const LOCK: &str = "counter";

pub fn show(namespace: &Namespace, time: Duration, stop: &Stop) -> anyhow::Result<()> {
    println!(
        "\n1. {PROCESSES} processes with {THREADS} threads each increment one counter: read it, add one, \
        write it back.\n   {time:?} without a lock, then {time:?} with a lock."
    );
    let without = run(namespace, "without", None, time, stop)?;
    println!("   without: {}", without.verdict());
    let with = run(namespace, "with", Some(LOCK.to_owned()), time, stop)?;
    println!("   with:    {}", with.verdict());
    print!("{}", report::table(&without, &with)?);

    ensure!(
        without.lost() > 0,
        "no update was lost without a lock, so this showed nothing: try more --seconds"
    );
    ensure!(with.made() > 0, "no increment was made with the lock");
    let wrong = with.made().abs_diff(with.counted);
    ensure!(
        wrong == 0,
        "exclusion failed: {} increments were made under the lock, but the counter is {}",
        with.made(),
        with.counted
    );
    let out_of_order: u64 = with.tallies.iter().map(|tally| tally.out_of_order).sum();
    ensure!(
        out_of_order == 0,
        "{out_of_order} grants had a fencing token that was not above the one before"
    );
    println!(
        "   Fencing tokens rose with each of the {} grants.",
        with.made()
    );
    Ok(())
}

fn run(
    namespace: &Namespace,
    name: &str,
    lock: Option<String>,
    time: Duration,
    stop: &Stop,
) -> anyhow::Result<Run> {
    let increment = Increment {
        counter: namespace.value_key(&format!("{name}:count")),
        last_token: namespace.value_key(&format!("{name}:token")),
        lock,
        threads: THREADS,
        time,
    };
    let mut processes = (1..=PROCESSES)
        .map(|n| {
            Actor::start(
                format!("process {n}"),
                namespace,
                Job::Increment(increment.clone()),
            )
        })
        .collect::<anyhow::Result<Vec<_>>>()?;
    for process in &processes {
        match stop.message(&process.0, STEP_LIMIT)? {
            Message::Ready => {}
            other => bail!(process.0.unexpected("Ready", &other)),
        }
    }
    for process in &mut processes {
        process.0.order(&Order::Go)?;
    }
    let bar = progress::bar_of_time(time, "counter: {msg}")?;
    let counted = || Ok(count(namespace, &increment.counter)?.to_string());
    progress::pass(time, &bar, stop, counted)?;
    bar.finish_and_clear();
    let tallies = processes
        .iter()
        .map(|process| match stop.message(&process.0, STEP_LIMIT)? {
            Message::Incremented(tally) => Ok(tally),
            other => Err(process.0.unexpected("Incremented", &other)),
        })
        .collect::<anyhow::Result<Vec<Tally>>>()?;
    let counted = count(namespace, &increment.counter)?;
    Ok(Run { tallies, counted })
}

fn count(namespace: &Namespace, counter: &str) -> anyhow::Result<u64> {
    let count: Option<u64> = namespace.ask(redis::cmd("GET").arg(counter))?;
    Ok(count.unwrap_or(0))
}
