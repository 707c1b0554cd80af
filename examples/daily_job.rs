//! A report that is sent once a day, by one of many machines on which the same timer fires.
//!
//! A lock alone is not enough: it keeps two from sending *at the same time*. The machine whose clock is
//! late finds the lock free again, and would send a second report. So it is written down, under the
//! lock, which day is done.
//!
//! `cargo run --example daily_job [day]`, with the address of your Redis in `REDIS_URL`. Run it twice.

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
        machine.join().expect("it does not panic")?;
    }
    Ok(())
}

fn timer_fires(client: &Client, machine: u32, day: u64) -> Result<(), leasehold::Error> {
    // `lock`, not `try_lock`: should the machine that has it crash, the next one does the work.
    let guard = client
        .mutex("daily-report")
        .max_hold(Duration::from_secs(600)) // one that hangs is not to cost us the day
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
    // The mark carries the token: a machine that slept through the end of its lease cannot undo
    // what its successor has written. (It may have sent the report, though. What must not be done
    // twice even then needs a key of its own where it is done: send it with the mail as its id.)
    done.write(guard.fencing_token(), day.to_string())?;
    guard.unlock()?; // also if Redis does not confirm it: the report is sent
    Ok(())
}

fn days_since_1970() -> Result<u64, Box<dyn Error>> {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    Ok(since.as_secs() / (24 * 60 * 60))
}
