//! A race: new clients of all processes want one key while single connections are killed, without other faults. The ttl
//! is longer than the race, so a waiter that is not woken or a lock that is not released stays noticeable.
//!
//! The clients' guards are checked as all others are. In addition, holders leave three traces in Redis: a counter that
//! they read and then write (two holders at a time lose an update), the number of holders inside, and their tokens.

use std::time::Duration;

use anyhow::Context as _;
use leasehold_testbed::{Reply, Server, eventually};
use leasehold_tools::stop::Stop;

use super::Subjects;
use crate::checks::Violation;
use crate::faults::{Effect, Fault, Kind};
use crate::inject::{Defect, NOBODYS, NOBODYS_TTL_MS};
use crate::messages::{Raced, key_in_redis, race_key};
use crate::random::Random;
use crate::records::now;

/// The keys of the racers' traces, and the name of the connections that write them.
pub const COUNTER: &str = "race:counter";
pub const INSIDE: &str = "race:inside";
pub const TOKENS: &str = "race:tokens";
pub const WITNESS: &str = "race-witness";

/// The limit for all clients to end and the lock to be free, on a busy machine.
const BOUND: Duration = Duration::from_secs(10);
/// The beginning of the name of a notification connection; the holder follows.
const NOTIFICATIONS: &str = "leasehold-notifications";

/// The results of a race.
#[derive(Default)]
pub struct Outcome {
    pub faults: Vec<Fault>,
    pub found: Vec<String>,
    /// Some clients did not end in time: the rest of this round proves nothing.
    pub is_hung: bool,
}

/// Runs a race. `subjects` must have no other faults. Returns when all clients of the race have ended, or after
/// [`BOUND`].
pub fn run(
    subjects: &mut Subjects,
    random: &mut Random,
    inject: Option<Defect>,
    stop: &Stop,
) -> anyhow::Result<Outcome> {
    let from = now();
    let mut outcome = Outcome::default();
    let server = &subjects.servers.primary;
    let answers = || server.command(&["PING"]).ok().is_some_and(is_pong);
    if !eventually(BOUND, answers) {
        outcome
            .found
            .push(format!("the server does not reply after {BOUND:?}"));
        return Ok(outcome);
    }
    for process in &mut subjects.processes {
        let clients = 1 + random.below(2);
        let threads = (0..clients).map(|_| 1 + random.below(2)).collect();
        process.prepare_race(threads)?;
    }
    if inject == Some(Defect::Nobody) {
        let key = in_redis();
        server.command(&["SET", &key, NOBODYS[0], "PX", NOBODYS_TTL_MS])?;
    }
    let time = random.millis(500, 2000);
    let until = now() + time.as_nanos() as u64;
    for process in &mut subjects.processes {
        process.go(until)?;
    }
    // Half of the races have a single kill, since a further kill could wake waiters that the first one left asleep.
    let kills = match random.one_in(2) {
        true => 1,
        false => 2 + random.below(19),
    };
    for _ in 0..kills {
        let left = time.mul_f64(0.95) / kills as u32;
        stop.pause(left.mul_f64(random.below(1000) as f64 / 500.0))?;
        if now() >= until {
            break;
        }
        outcome.faults.extend(kill_one(server, random)?);
    }
    let mut reports = Vec::new();
    for process in &subjects.processes {
        let end = until + BOUND.as_nanos() as u64;
        match process.raced(Duration::from_nanos(end.saturating_sub(now())))? {
            Some(report) => reports.push(report),
            None => {
                let name = process.name();
                outcome
                    .found
                    .push(format!("{name} still races after {BOUND:?}"));
            }
        }
    }
    outcome.is_hung = !outcome.found.is_empty();
    if outcome.is_hung {
        outcome.found.push(state(server)?);
    } else {
        if inject == Some(Defect::Update) {
            server.command(&["DECR", COUNTER])?;
        }
        outcome.found = traces(server, &reports)?;
        let is_free = || server.command(&["EXISTS", &in_redis()]).ok() == Some(Reply::Int(0));
        if !eventually(BOUND, is_free) {
            outcome.found.push("no client releases the lock".to_owned());
            outcome.found.push(state(server)?);
        }
        server.command(&["DEL", COUNTER, INSIDE, TOKENS])?;
    }
    outcome.faults.push(Fault {
        kind: Kind::Raced,
        from,
        to: now(),
        effect: Effect::None,
    });
    Ok(outcome)
}

/// The findings as violations of the round.
pub fn violations(found: Vec<String>, from: u64) -> impl Iterator<Item = Violation> {
    found.into_iter().map(move |text| Violation {
        text: format!("in a race: {text}"),
        key: Some(race_key()),
        from,
        to: now(),
    })
}

fn is_pong(reply: Reply) -> bool {
    reply.as_text() == Some("PONG")
}

fn in_redis() -> String {
    key_in_redis(race_key())
}

/// Kills one connection of the clients, if there is one.
fn kill_one(server: &Server, random: &mut Random) -> anyhow::Result<Option<Fault>> {
    let from = now();
    let list = server.command(&["CLIENT", "LIST"])?;
    let list = list.as_text().context("CLIENT LIST is text")?;
    let field = |line: &str, name: &str| {
        let mut fields = line.split(' ').filter_map(|field| field.split_once('='));
        let found = fields.find(|(each, _)| *each == name);
        found.map_or(String::new(), |(_, value)| value.to_owned())
    };
    let is_clients = |line: &&str| {
        field(line, "name") != WITNESS
            && field(line, "cmd") != "client|list"
            && !["S", "M"].contains(&&*field(line, "flags"))
    };
    let of_clients: Vec<&str> = list.lines().filter(is_clients).collect();
    if of_clients.is_empty() {
        return Ok(None);
    }
    let one = of_clients[random.below(of_clients.len())];
    let killed = server.command(&["CLIENT", "KILL", "ID", &field(one, "id")])?;
    let kind = match field(one, "name").starts_with(NOTIFICATIONS) {
        true => Kind::NotificationsKilled,
        false => Kind::PipelineKilled,
    };
    // The connection may have ended by itself.
    Ok((killed == Reply::Int(1)).then(|| Fault {
        kind,
        from,
        to: now(),
        effect: Effect::None,
    }))
}

/// The violations that the traces in Redis show.
fn traces(server: &Server, reports: &[Raced]) -> anyhow::Result<Vec<String>> {
    let counted = server.command(&["GET", COUNTER])?;
    let counted = counted.as_text().unwrap_or("0").parse()?;
    let tokens = match server.command(&["LRANGE", TOKENS, "0", "-1"])? {
        Reply::Array(tokens) => tokens,
        other => anyhow::bail!("LRANGE replies {other}"),
    };
    let tokens = tokens.iter().filter_map(Reply::as_text);
    let tokens = tokens.map(str::parse).collect::<Result<Vec<u64>, _>>()?;
    let raised = reports.iter().map(|report| report.raised).sum();
    Ok(judge(raised, counted, &tokens))
}

fn judge(raised: u64, counted: u64, tokens: &[u64]) -> Vec<String> {
    let mut found = Vec::new();
    if counted != raised {
        let lost = raised.abs_diff(counted);
        found.push(format!(
            "{lost} of {raised} updates made under the lock were lost"
        ));
    }
    if tokens.len() as u64 != raised {
        let count = tokens.len();
        found.push(format!(
            "{raised} holders were inside and left {count} tokens"
        ));
    }
    if let Some(pair) = tokens.windows(2).find(|pair| pair[0] >= pair[1]) {
        found.push(format!(
            "the holder of {} was inside before that of {}",
            pair[0], pair[1]
        ));
    }
    found
}

/// The state in Redis, to explain a failure.
fn state(server: &Server) -> anyhow::Result<String> {
    let key = in_redis();
    let value = server.command(&["GET", &key])?;
    let left = server.command(&["PTTL", &key])?;
    let clients = server.command(&["CLIENT", "LIST"])?;
    let clients = clients.as_text().unwrap_or_default();
    Ok(format!(
        "the key: {value}, for {left} ms; the connections:\n{clients}"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lost_updates_missing_tokens_and_falling_tokens_are_found() {
        assert!(judge(3, 3, &[1, 2, 5]).is_empty());
        assert_eq!(
            judge(3, 2, &[1, 2, 5]),
            ["1 of 3 updates made under the lock were lost"]
        );
        assert_eq!(
            judge(3, 3, &[1, 2]),
            ["3 holders were inside and left 2 tokens"]
        );
        for falling in [[2, 1], [2, 2]] {
            let [found] = &judge(2, 2, &falling)[..] else {
                panic!("one finding");
            };
            assert!(
                found.starts_with("the holder of 2 was inside before"),
                "{found}"
            );
        }
    }
}
