//! How to test code that uses locks: without a server, and without waiting.
//!
//! `MemoryStore` keeps locks in this process, as Redis would. A test can move its clock, delete its keys, and let it
//! fail. So a test of a rare outage takes microseconds.
//!
//! Run `cargo run --example unit_testing` (in your project these are `#[test]`s).

use std::error::Error;
use std::time::Duration;

use leasehold::{Client, ErrorKind, LossReason, MemoryStore};

/// The code under test. Imports all rows, or stops when the lock is lost. The caller passes the client in.
fn import(client: &Client, rows: &mut dyn Iterator<Item = u32>) -> Result<u32, leasehold::Error> {
    let guard = client.mutex("import").lock()?;
    let mut sum = 0;
    for row in rows {
        guard.check()?; // before each row, so little work happens after a loss
        sum += row;
    }
    guard.unlock()?;
    Ok(sum)
}

fn imports_all_rows() -> Result<(), Box<dyn Error>> {
    let client = Client::memory()?;
    assert_eq!(import(&client, &mut [1, 2, 3].into_iter())?, 6);
    assert!(!client.mutex("import").is_locked()?, "released at the end");
    Ok(())
}

fn stops_when_the_process_slept_for_longer_than_the_ttl() -> Result<(), Box<dyn Error>> {
    let memory = MemoryStore::new();
    let mut rows = [1, 2, 3].into_iter().inspect(|row| {
        if *row == 2 {
            memory.advance(Duration::from_secs(60)); // the ttl is 30 s
        }
    });
    let error = import(&memory.client()?, &mut rows).expect_err("the process slept for too long");
    assert_eq!(error.kind(), ErrorKind::LeaseLost);
    assert_eq!(error.loss_reason(), Some(&LossReason::Expired));
    assert_eq!(rows.next(), Some(3), "the third row is not imported");
    Ok(())
}

fn is_kept_out_by_another_machine() -> Result<(), Box<dyn Error>> {
    let memory = MemoryStore::new();
    let (here, there) = (memory.client()?, memory.client()?);
    let guard = there.mutex("import").lock()?;
    let wait = Duration::from_millis(10);
    assert!(here.mutex("import").try_lock_for(wait)?.is_none());
    guard.unlock()?;
    assert_eq!(import(&here, &mut [1].into_iter())?, 1);
    Ok(())
}

fn goes_on_after_a_short_outage() -> Result<(), Box<dyn Error>> {
    let memory = MemoryStore::new();
    let mut rows = [1, 2, 3].into_iter().inspect(|row| {
        if *row == 2 {
            memory.fail(ErrorKind::Unavailable);
            memory.advance(Duration::from_secs(15)); // the renewal fails
            memory.recover();
        }
    });
    assert_eq!(import(&memory.client()?, &mut rows)?, 6);
    Ok(())
}

fn stops_when_an_outage_lasts_for_longer_than_the_ttl() -> Result<(), Box<dyn Error>> {
    let memory = MemoryStore::new();
    let mut rows = [1, 2, 3].into_iter().inspect(|row| {
        if *row == 2 {
            memory.fail(ErrorKind::Unavailable);
            memory.advance(Duration::from_secs(60));
        }
    });
    let error = import(&memory.client()?, &mut rows).expect_err("the lock was not renewed");
    assert_eq!(error.loss_reason(), Some(&LossReason::Expired));
    Ok(())
}

fn does_nothing_without_redis() -> Result<(), Box<dyn Error>> {
    let memory = MemoryStore::new();
    let client = memory.builder().outage_timeout(Duration::ZERO).build()?;
    memory.fail(ErrorKind::Unavailable);
    let mut rows = [1, 2, 3].into_iter();
    let error = import(&client, &mut rows).expect_err("the store fails");
    assert!(error.is_unavailable());
    assert_eq!(rows.next(), Some(1), "no row is imported");
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    imports_all_rows()?;
    stops_when_the_process_slept_for_longer_than_the_ttl()?;
    is_kept_out_by_another_machine()?;
    goes_on_after_a_short_outage()?;
    stops_when_an_outage_lasts_for_longer_than_the_ttl()?;
    does_nothing_without_redis()?;
    println!("all as it should be");
    Ok(())
}
