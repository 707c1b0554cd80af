//! Scene four: somebody overwrites the lock by hand. Its holder is told, and leaves alone what is no
//! longer its own.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use redis::ConnectionAddr;

use super::actor::Actor;
use super::messages::{Job, Message};
use super::{PATIENCE, TTL};
use crate::space::Space;
use crate::stop::Stop;

const LOCK: &str = "theft";
const THIEF: &str = "stolen-by-hand";
/// How long the thief's value lives, should the demo be killed.
const THIEF_TTL: Duration = Duration::from_secs(60);
const PROGRAMS: [&str; 2] = ["redis-cli", "valkey-cli"];

pub fn show(space: &Space, stop: &Stop) -> anyhow::Result<()> {
    println!("\n4. A lock with a ttl of {TTL:?} is stolen: its key is overwritten by hand.");
    let job = Job::Hold {
        key: LOCK.to_owned(),
        ttl: TTL,
    };
    let mut holder = Actor::start("the holder", space, job)?;
    holder.grant(stop, PATIENCE)?;

    let key = space.lock_key(LOCK);
    let start = Instant::now();
    let means = steal(space, &key)?;
    let message = stop.message(&holder.0, TTL + PATIENCE);
    let reason = match message.context("the holder was not told of the theft")? {
        Message::Lost { reason } => reason,
        other => bail!(holder.0.unexpected("Lost", &other)),
    };
    let told = start.elapsed();

    ensure!(
        told <= TTL,
        "the holder was told only {told:.2?} after the theft, not within {TTL:?}"
    );
    let (lost, objection) = holder.condition(stop)?;
    ensure!(lost, "the holder has its signal, yet is_lost() says no");
    ensure!(
        objection.is_some(),
        "the holder has its signal, yet check() has no objection"
    );
    ensure!(
        holder.release(stop)?.is_some(),
        "the holder could unlock a lock it had lost"
    );
    let value: Option<String> = space.ask(redis::cmd("GET").arg(&key))?;
    ensure!(
        value.as_deref() == Some(THIEF),
        "the former holder's unlock() changed a key that was no longer its own"
    );
    println!("   Stolen with {means}; its holder was told after {told:.2?} ({reason}).");
    Ok(())
}

/// Overwrites the key: by the command line tool where there is one. Says by what means.
fn steal(space: &Space, key: &str) -> anyhow::Result<&'static str> {
    let ttl = THIEF_TTL.as_millis().to_string();
    let words = ["SET", key, THIEF, "PX", &ttl];
    for program in PROGRAMS {
        let Some(mut command) = command_line(program, space) else {
            break;
        };
        let Ok(output) = command.args(words).output() else {
            continue;
        };
        let answer = String::from_utf8_lossy(&output.stdout);
        ensure!(
            output.status.success() && answer.trim() == "OK",
            "{program} could not overwrite the key: {answer}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        return Ok(program);
    }
    let mut command = redis::Cmd::new();
    let () = space
        .ask(command.arg(&words))
        .context("the theft itself failed")?;
    Ok("a plain SET (there is no redis-cli here)")
}

/// `program`, told where the server is. `None` for a kind of address it cannot be told.
fn command_line(program: &str, space: &Space) -> Option<Command> {
    let info = space.connection_info();
    let mut command = Command::new(program);
    match info.addr() {
        ConnectionAddr::Tcp(host, port) => command.args(["-h", host, "-p", &port.to_string()]),
        ConnectionAddr::Unix(path) => command.arg("-s").arg(path),
        _ => return None,
    };
    let settings = info.redis_settings();
    command.args(["-n", &settings.db().to_string()]);
    if let Some(user) = settings.username() {
        command.args(["--user", user]);
    }
    // By the environment: arguments are there for everybody on the machine to read.
    if let Some(password) = settings.password() {
        command.env("REDISCLI_AUTH", password);
    }
    Some(command)
}
