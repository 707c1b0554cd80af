//! A report that is sent once a day, by one of many machines on which the same timer fires.
//!
//! A lock alone is not enough: it only prevents that two machines send the report *at the same time*. A machine whose
//! clock is late would find the lock free, and send a second report. So the machine that sends the report also writes
//! down the day, under the lock.
//!
//! Run `cargo run --example daily_job [day]`, with the address of your Redis in `REDIS_URL`. Run it twice.

use std::env;
use std::error::Error;
use std::thread;
use std::time::{Duration, SystemTime};

use leasehold::Client;

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
    // `lock` instead of `try_lock`: if the machine that holds the lock crashes, the next machine sends the report.
    let guard = client
        .mutex("daily-report")
        .max_hold(Duration::from_secs(600)) // if a machine hangs, another machine sends the report
        .lock()?;
    let done = client.fenced_value("daily-report:last-day");
    let last: Option<u64> = match done.read()? {
        Some(text) => String::from_utf8_lossy(&text).parse().ok(),
        None => None,
    };
    if last >= Some(day) {
        println!("machine {machine}: day {day} is done");
        guard.unlock()?;
        return Ok(());
    }
    println!("machine {machine}: sends the report of day {day}");
    // Write the day under the fencing token: a machine whose lease ended while it slept cannot overwrite the day of the
    // next holder. (But that machine may still send its report. If the report must not be sent twice even then, send an
    // id such as the day with the mail, and let the receiver accept each id once.)
    done.write(guard.fencing_token(), day.to_string())?;
    guard.unlock()?; // no error if Redis does not confirm the release: the report is sent
    Ok(())
}

fn days_since_1970() -> Result<u64, Box<dyn Error>> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    Ok(since.as_secs() / (24 * 60 * 60))
}
