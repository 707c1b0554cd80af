//! A service object whose methods lock the same lock and call one another.
//!
//! With a plain mutex, `deposit_less_fee` would wait for itself without end. With a reentrant mutex, the inner methods
//! lock again without a request to Redis, and the lock is released when the outermost method returns.
//!
//! Run `cargo run --example reentrant`, with the address of your Redis in `REDIS_URL`.

use std::env;
use std::error::Error;

use leasehold::{Client, FencedValue, ReentrantMutex};

struct Account {
    mutex: ReentrantMutex,
    balance: FencedValue,
}

impl Account {
    fn new(client: &Client, name: &str) -> Self {
        Self {
            mutex: client.reentrant_mutex(name),
            balance: client.fenced_value(name),
        }
    }

    fn balance(&self) -> Result<i64, Box<dyn Error>> {
        match self.balance.read()? {
            Some(text) => Ok(String::from_utf8(text)?.parse()?),
            None => Ok(0),
        }
    }

    /// Reads the balance, adds `amount`, and writes the sum. No other process may write in between.
    fn deposit(&self, amount: i64) -> Result<(), Box<dyn Error>> {
        self.mutex.with(|guard| {
            println!("  {amount:+}, with the lock taken {} times", guard.depth());
            let after = self.balance()? + amount;
            // If this guard has lost its lock, and a later holder has written, this write is refused.
            self.balance
                .write(guard.fencing_token(), after.to_string())?;
            Ok(())
        })?
    }

    /// Does two steps under one lock: other holders of the lock see both steps or neither.
    fn deposit_less_fee(&self, amount: i64, fee: i64) -> Result<(), Box<dyn Error>> {
        self.mutex.with(|_| {
            self.deposit(amount)?;
            self.deposit(-fee)
        })?
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let account = Account::new(&Client::open(&url)?, "example:account:7");
    let before = account.balance()?;
    account.deposit(10)?;
    account.deposit_less_fee(100, 2)?;
    println!("the balance rose by {}", account.balance()? - before);
    Ok(())
}
