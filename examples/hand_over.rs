//! A lock that passes from one process to another without being free in between.
//!
//! Use this if a new version of a service replaces the old version, or if one process begins a job and another ends it.
//! Here the parent acquires the lock, and transfers it to a child. The child gets a greater token. So once the child
//! has written, a fenced storage refuses late writes of the parent.
//!
//! Run `cargo run --example hand_over`, with the address of your Redis in `REDIS_URL`.

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
    // Now no process renews the lock, and only the adopter of the ticket can take it. If the child does not adopt the lock within its ttl (30 s), the lock is free.
    let ticket = guard.into_ticket()?;
    let mut child = Command::new(env::current_exe()?)
        .arg("child")
        .stdin(Stdio::piped())
        .spawn()?;
    // Send the ticket through stdin: other users of the machine can see arguments, and a ticket is enough to take the
    // lock.
    let mut stdin = child.stdin.take().expect("stdin is piped");
    writeln!(stdin, "{ticket}")?;
    let status = child.wait()?;

    let is_free = client.mutex("example:deploy").try_lock()?.is_some();
    println!("parent: the child has ended ({status}), the lock is free: {is_free}");
    Ok(())
}

fn child(client: &Client) -> Result<(), Box<dyn Error>> {
    let mut ticket = String::new();
    io::stdin().read_line(&mut ticket)?;
    // This process renews the lock now. The ticket is used up.
    let guard = client.adopt(ticket.trim_end())?;
    println!("child: goes on, with token {}", guard.fencing_token());
    guard.unlock()?;
    Ok(())
}
