//! A lock that passes from one process to another without being free in between.
//!
//! A service that is replaced by its new version, or a job that is begun here and ended there: the
//! parent takes the lock, begins, and hands over to a child; the token stays the same, so whatever is
//! fenced takes both for one holder.
//!
//! `cargo run --example hand_over`, with the address of your Redis in `REDIS_URL`.

use std::env;
use std::error::Error;
use std::io::{self, Write as _};
use std::process::{Command, Stdio};

use leasehold::Client;

fn main() -> Result<(), Box<dyn Error>> {
    let url = env::var("REDIS_URL").unwrap_or_else(|_| "redis://127.0.0.1:6379".to_owned());
    let client = Client::open(&url)?;
    if env::args().nth(1).as_deref() == Some("child") {
        return child(&client);
    }

    let guard = client.mutex("example:deploy").lock()?;
    println!("parent: begins, with token {}", guard.fencing_token());
    // From here on the lock is nobody's, but nobody else can have it. It waits for its ttl (30 s), and is
    // free then if the child has not come.
    let ticket = guard.into_ticket()?;
    let mut child = Command::new(env::current_exe()?)
        .arg("child")
        .stdin(Stdio::piped())
        .spawn()?;
    // By stdin and not as an argument: who can read the ticket can take the lock.
    let mut stdin = child.stdin.take().expect("it is piped");
    writeln!(stdin, "{ticket}")?;
    let status = child.wait()?;

    let is_free = client.mutex("example:deploy").try_lock()?.is_some();
    println!("parent: the child has ended ({status}), the lock is free: {is_free}");
    Ok(())
}

fn child(client: &Client) -> Result<(), Box<dyn Error>> {
    let mut ticket = String::new();
    io::stdin().read_line(&mut ticket)?;
    // Renewed from now on by this process; a ticket is good once.
    let guard = client.adopt(ticket.trim_end())?;
    println!("child: goes on, with token {}", guard.fencing_token());
    guard.unlock()?;
    Ok(())
}
