//! Scene four: another user overwrites the lock's key. Its holder is notified, and leaves the other user's
//! value alone.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use leasehold_tools::environment::Namespace;
use leasehold_tools::stop::Stop;
use redis::ConnectionAddr;

use crate::actor::Actor;
use crate::messages::{Job, Message};
use crate::{STEP_LIMIT, TTL};

const LOCK: &str = "overwritten";
const FOREIGN: &str = "overwritten-by-the-demo";
/// The ttl of the other user's value, in case the demo is killed.
const FOREIGN_TTL: Duration = Duration::from_secs(60);
const PROGRAMS: [&str; 2] = ["redis-cli", "valkey-cli"];

pub fn show(namespace: &Namespace, stop: &Stop) -> anyhow::Result<()> {
    println!("\n4. The key of a held lock with a ttl of {TTL:?} is overwritten.");
    let job = Job::Hold {
        key: LOCK.to_owned(),
        ttl: TTL,
    };
    let mut holder = Actor::start("the holder", namespace, job)?;
    holder.grant(stop, STEP_LIMIT)?;

    let key = namespace.lock_key(LOCK);
    let start = Instant::now();
    let means = overwrite(namespace, &key)?;
    let message = stop.message(&holder.0, TTL + STEP_LIMIT);
    let reason = match message.context("the holder was not notified of the loss")? {
        Message::Lost { reason } => reason,
        other => bail!(holder.0.unexpected("Lost", &other)),
    };
    let delay = start.elapsed();

    ensure!(
        delay <= TTL,
        "the holder was notified only {delay:.2?} after the write, not within {TTL:?}"
    );
    let (lost, objection) = holder.condition(stop)?;
    ensure!(
        lost,
        "the holder got its signal, but is_lost() returns false"
    );
    ensure!(
        objection.is_some(),
        "the holder got its signal, but check() returns no error"
    );
    ensure!(
        holder.release(stop)?.is_some(),
        "the holder's unlock() succeeded, though it had lost the lock"
    );
    let value: Option<String> = namespace.ask(redis::cmd("GET").arg(&key))?;
    ensure!(
        value.as_deref() == Some(FOREIGN),
        "the former holder's unlock() changed the other user's value"
    );
    println!("   Overwritten with {means}; its holder was notified {delay:.2?} later: {reason}.");
    Ok(())
}

/// Overwrites the key, with a command line tool if there is one. Returns the name of the tool.
fn overwrite(namespace: &Namespace, key: &str) -> anyhow::Result<&'static str> {
    let ttl = FOREIGN_TTL.as_millis().to_string();
    let words = ["SET", key, FOREIGN, "PX", &ttl];
    for program in PROGRAMS {
        let Some(mut command) = command_line(program, namespace) else {
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
    let () = namespace
        .ask(command.arg(&words))
        .context("the write itself failed")?;
    Ok("SET (redis-cli is not installed)")
}

/// `program` with the address of the server. `None` for a kind of address that it cannot use.
fn command_line(program: &str, namespace: &Namespace) -> Option<Command> {
    let info = namespace.connection_info();
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
    // The password is passed in the environment, since every user of the machine can read arguments.
    if let Some(password) = settings.password() {
        command.env("REDISCLI_AUTH", password);
    }
    Some(command)
}
