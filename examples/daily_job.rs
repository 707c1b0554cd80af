//! A report that is sent once a day, by one of many machines on which the same timer fires.
//!
//! A lock alone is not enough: it only prevents two machines from sending the report *at the same time*. A machine whose
//! clock is late would find the lock free, and send a second report. So `Client::once` also records that the report was
//! sent. The name identifies one report, here by the day in UTC.
//!
//! Run `cargo run --example daily_job [day]`, with the address of your Redis in `REDIS_URL`. Run it twice.

use std::env;
use std::error::Error;
use std::thread;
use std::time::{Duration, SystemTime};

use leasehold::{Client, MutexGuard, Run};

fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let day: u64 = match env::args().nth(1) {
        Some(day) => day.parse()?,
        None => days_since_1970()?,
    };
    let mut machines = Vec::new();
    for number in 1..=3 {
        let client = Client::open(&url)?;
        machines.push(thread::spawn(move || timer_fires(&client, number, day)));
    }
    for machine in machines {
        machine.join().expect("the machine does not panic")?;
    }
    Ok(())
}

fn timer_fires(client: &Client, machine: u32, day: u64) -> Result<(), leasehold::Error> {
    let report = client
        .mutex(format!("daily-report:{day}"))
        .max_hold(Duration::from_secs(600)) // if a machine hangs, another machine sends the report
        .once();
    // `run` instead of `try_run`: if the machine that sends the report crashes, the next machine sends it.
    match report.run(|guard| send(guard, machine, day))? {
        Run::Ran(mails) => println!("machine {machine}: sent {mails} mails"),
        Run::Done(record) => println!(
            "machine {machine}: day {day} is done by {}",
            record.holder()
        ),
        Run::Interrupted(_) => unreachable!("only with `at_most_once`"),
    }
    Ok(())
}

/// Returns the number of mails, which becomes part of the record.
///
/// If the machine crashes between the last mail and the record, another machine sends the report again. If that would
/// do harm, give the mail server an id such as the day, which it accepts once, or use `at_most_once`.
fn send(guard: &MutexGuard, machine: u32, day: u64) -> Result<u32, leasehold::Error> {
    println!("machine {machine}: sends the report of day {day}");
    let recipients = ["north", "south"];
    for _ in recipients {
        guard.check()?; // stops if the lock was lost: another machine may be sending
    }
    Ok(recipients.len() as u32)
}

fn days_since_1970() -> Result<u64, Box<dyn Error>> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    Ok(since.as_secs() / (24 * 60 * 60))
}
