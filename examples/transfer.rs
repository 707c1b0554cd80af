//! Money that moves between two accounts, each with a lock of its own, while both locks are held.
//!
//! Threads transfer in all directions at the same time. All clients lock a set of keys in one order, so they never wait
//! for each other in a circle. An operator takes locks away now and then. A transfer whose lock is lost writes nothing, so
//! the sum of all accounts never changes.
//!
//! Run `cargo run --example transfer`, with the address of your Redis in `REDIS_URL`.

use std::env;
use std::error::Error;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use leasehold::Client;
use leasehold::redis::{self, Commands};

const ACCOUNTS: usize = 5;
const START: i64 = 100;

/// The name of an account's lock.
fn account(n: usize) -> String {
    format!("example:account:{n}")
}

/// The key of an account's balance.
fn balance(n: usize) -> String {
    format!("example:balance:{n}")
}

/// Moves `amount`. Returns false if the account has too little.
fn transfer(
    client: &Client,
    from: usize,
    to: usize,
    amount: i64,
) -> Result<bool, leasehold::Error> {
    let both = client.mutexes([account(from), account(to)]).lock()?;
    let moved = both.transaction(|conn, pipe| {
        let available: i64 = conn.get(balance(from))?;
        if available >= amount {
            pipe.decr(balance(from), amount).incr(balance(to), amount);
        }
        Ok(available >= amount)
    })?;
    Ok(moved.value)
}

fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let mut redis = redis::Client::open(url.as_str())?.get_connection()?;
    for n in 0..ACCOUNTS {
        redis.set::<_, _, ()>(balance(n), START)?;
    }
    let (moved, refused) = (AtomicU32::new(0), AtomicU32::new(0));
    let client = Client::open(&url)?;
    thread::scope(|scope| {
        let tellers: Vec<_> = (0..4)
            .map(|teller| {
                let (client, moved, refused) = (&client, &moved, &refused);
                scope.spawn(move || {
                    for turn in 0..50 {
                        let from = (teller + turn) % ACCOUNTS;
                        let to = (from + 1 + turn % (ACCOUNTS - 1)) % ACCOUNTS;
                        match transfer(client, from, to, 30) {
                            Ok(true) => moved.fetch_add(1, Ordering::Relaxed),
                            Ok(false) => 0,
                            Err(error) if error.is_lease_lost() => {
                                refused.fetch_add(1, Ordering::Relaxed)
                            }
                            Err(error) => panic!("{error}"),
                        };
                    }
                })
            })
            .collect();
        let mut turn = 0;
        while tellers.iter().any(|teller| !teller.is_finished()) {
            turn = (turn + 1) % ACCOUNTS;
            client.mutex(account(turn)).force_unlock()?;
        }
        Ok::<(), leasehold::Error>(())
    })?;
    let balances: Vec<i64> = redis.mget((0..ACCOUNTS).map(balance).collect::<Vec<_>>())?;
    let sum: i64 = balances.iter().sum();
    println!("{balances:?}, {} transfers", moved.load(Ordering::Relaxed));
    println!(
        "{} found a lock lost and wrote nothing",
        refused.load(Ordering::Relaxed)
    );
    assert_eq!(
        sum,
        START * ACCOUNTS as i64,
        "a transfer writes both balances or none"
    );
    println!("the sum is {sum}, as before");
    Ok(())
}
