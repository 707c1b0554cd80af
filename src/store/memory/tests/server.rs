//! Sends the same commands to a real Redis and to a keyspace in memory, and compares replies, values and notifications.

use std::any::Any;
use std::collections::HashMap;
use std::fmt::Display;
use std::time::Duration;

use leasehold_testbed::{Cluster, Server};
use redis::{Connection, Value};

use super::histories::{CLIENTS, Operation, holder, key, value_key, with_right_token};
use crate::error::Error;
use crate::store::command::{Command, FIRST_USUAL_PLACE, Queued, Reply};
use crate::store::memory::{Keyspace, Notification, Step};
use crate::store::redis::scripts::{
    self, Decoded, ScriptContext, ScriptKind, ScriptRef, strip_comments,
};
use crate::store::value::{LockValue, has_queue};
use crate::util::clock::MonotonicTime;
use crate::util::id::HolderId;
use crate::util::key::{self, Key, KeyLayout};
use crate::util::slot::Slot;

/// The texts of the scripts. One of them may have a planted difference.
pub(super) struct Scripts(Vec<String>);

impl Scripts {
    pub(super) fn real() -> Self {
        Self(ScriptKind::ALL.map(|kind| kind.text().to_owned()).to_vec())
    }

    /// The scripts with a first line by which Redis 7 refuses them all access to a second slot.
    pub(super) fn of_one_slot() -> Self {
        let real = Self::real().0.into_iter();
        Self(real.map(|text| format!("#!lua\n{text}")).collect())
    }

    pub(super) fn are_strict(&self) -> bool {
        self.0[0].starts_with("#!")
    }

    /// Replaces `from` by `to` in a script, in each place where it occurs.
    pub(super) fn planted(kind: ScriptKind, from: &str, to: &str) -> Self {
        let mut scripts = Self::real();
        let text = &mut scripts.0[kind as usize];
        let (from, to) = (strip_comments(from), strip_comments(to));
        assert!(text.contains(&from), "{kind:?} has {from:?}");
        *text = text.replace(&from, &to);
        scripts
    }
}

pub(super) struct Redis {
    connection: Connection,
    subscriber: Connection,
    layout: KeyLayout,
    shard_slot: Option<Slot>,
    /// A [`Server`] or a [`Cluster`].
    _server: Box<dyn Any>,
}

/// The rounding error of a clock in whole milliseconds. A step that takes longer than this is not compared.
const GRAIN: Duration = Duration::from_millis(2);
/// A history is run again until all of its steps are short enough, but at most this often.
const RUNS: usize = 100;

/// The reply and the state of Redis after a step.
struct Found {
    reply: Result<Reply, Error>,
    published: Vec<String>,
    looked: [Looked; 2],
    /// Whether the fenced value exists, and when it expires.
    value: (bool, Option<MonotonicTime>),
    before: MonotonicTime,
    after: MonotonicTime,
}

/// The state of a key after a step.
struct Looked {
    value: Option<String>,
    /// When the key expires.
    end: Option<MonotonicTime>,
    /// The waiters of the key's queue.
    queue: Vec<String>,
}

impl Looked {
    fn of(results: &[Value], at: MonotonicTime) -> Self {
        let [value, left, queue] = results else {
            panic!("{results:?}");
        };
        let left: i64 = redis::from_redis_value_ref(left).unwrap();
        let left = u64::try_from(left).ok().map(Duration::from_millis);
        Self {
            value: redis::from_redis_value_ref(value).unwrap(),
            end: left.map(|left| at.after(left)),
            queue: redis::from_redis_value_ref(queue).unwrap(),
        }
    }
}

impl Redis {
    pub(super) fn start() -> Self {
        let server = Server::start().unwrap();
        Self::on(&server.url(), Box::new(server), KeyLayout::Single, None)
    }

    /// A node that serves all slots of a Cluster. `slot` names its shard channels.
    pub(super) fn start_cluster_node(slot: Option<Slot>) -> Self {
        let builder = Cluster::builder().masters(1).without_replicas();
        let cluster = builder.start().unwrap();
        let url = cluster.nodes()[0].url();
        Self::on(&url, Box::new(cluster), KeyLayout::Slots, slot)
    }

    fn on(url: &str, server: Box<dyn Any>, layout: KeyLayout, shard_slot: Option<Slot>) -> Self {
        let client = redis::Client::open(url).unwrap();
        let connection = client.get_connection().unwrap();
        let mut subscriber = client.get_connection().unwrap();
        // All clients but the last one listen. The subscription to all channels only records the messages.
        let names = &CLIENTS[..CLIENTS.len() - 1];
        let channels = names
            .iter()
            .map(|name| ("SUBSCRIBE", format!("p:~to:{name}")));
        let mut channels: Vec<_> = channels.chain([("PSUBSCRIBE", "*".to_owned())]).collect();
        if let Some(slot) = shard_slot {
            // The first client does not subscribe to it, like a client that does not know yet that slots have moved.
            let start = key::shard_channel_start(layout, "p:", slot);
            let listen = |name| ("SSUBSCRIBE", format!("{start}{name}"));
            channels.extend(names[1..].iter().map(listen));
        }
        for (command, channel) in channels {
            let mut subscribe = redis::cmd(command);
            subscribe.arg(channel);
            subscriber
                .send_packed_command(&subscribe.get_packed_command())
                .unwrap();
            subscriber.recv_response().unwrap();
        }
        Self {
            connection,
            subscriber,
            layout,
            shard_slot,
            _server: server,
        }
    }

    /// Whether the server can refuse scripts access to a second slot: Redis 7 and later.
    pub(super) fn knows_strict_scripts(&mut self) -> bool {
        let mut strict = redis::cmd("EVAL");
        strict.arg("#!lua\nreturn 1").arg(0);
        strict.exec(&mut self.connection).is_ok()
    }

    fn fence_counter(&self) -> String {
        key::fence_counter("p:") + key(0).fence_tag(self.layout)
    }

    /// Runs a history on Redis and on the keyspace. Fails with the difference. If a busy machine stops Redis during a
    /// step, it is unknown when keys expired, and the history runs again.
    pub(super) fn compare(
        &mut self,
        scripts: &Scripts,
        history: &[Operation],
    ) -> Result<(), String> {
        let mut runs = std::iter::repeat_with(|| self.compare_once(scripts, history));
        let compared = runs.by_ref().take(RUNS).flatten().next();
        compared.expect("Redis is not stopped in one of the history's runs")
    }

    /// Runs the history once. Returns `None` if a step took too long.
    fn compare_once(
        &mut self,
        scripts: &Scripts,
        history: &[Operation],
    ) -> Option<Result<(), String>> {
        redis::cmd("FLUSHALL").exec(&mut self.connection).unwrap();
        let mut twin = Twin::default();
        for (n, operation) in history.iter().enumerate() {
            if let Err(how) = self.step(scripts, &mut twin, operation)? {
                return Some(Err(format!("step {n}: {how}")));
            }
        }
        Some(Ok(()))
    }

    /// Runs one operation on Redis and on the keyspace. Returns `None` if the operation took too long.
    fn step(
        &mut self,
        scripts: &Scripts,
        twin: &mut Twin,
        operation: &Operation,
    ) -> Option<Result<(), String>> {
        let (by, command) = match operation {
            Operation::Pause(pause) => {
                let _ = crossbeam_channel::never::<()>().recv_timeout(*pause);
                return Some(Ok(()));
            }
            Operation::Delete(key) => {
                let mut delete = redis::cmd("DEL");
                delete
                    .arg(key.in_redis())
                    .exec(&mut self.connection)
                    .unwrap();
                twin.keyspace.remove(key);
                return Some(Ok(()));
            }
            Operation::PutBack(by) => {
                self.put_back(*by);
                twin.keyspace.put_back(*by);
                return Some(Ok(()));
            }
            Operation::Ask { by, command } => (holder(*by), command),
        };
        let found = self.find(scripts, &by, command)?;
        // It is unknown whether a key expired before the command, between the command and the reads, or not at all. The
        // memory store has to agree with Redis in one of these cases.
        let either = [found.before.before(GRAIN), found.after.after(GRAIN)];
        let at = |choice: usize, n: usize| either[choice >> n & 1];
        let mut how = String::new();
        for choice in 0..16 {
            let mut next = twin.clone();
            let looked_at = [1, 2, 3].map(|n| at(choice, n));
            match next.follow(&found, &by, command, at(choice, 0), looked_at) {
                Ok(()) => {
                    *twin = next;
                    return Some(Ok(()));
                }
                Err(difference) => how = difference,
            }
        }
        Some(Err(how))
    }

    /// Runs the command and reads the keys in one transaction. Returns `None` if the transaction took too long.
    fn find(&mut self, scripts: &Scripts, by: &HolderId, command: &Command) -> Option<Found> {
        let kind = ScriptKind::of(command).unwrap();
        let request = self.request(scripts, kind, by, command);
        let mut look = redis::pipe();
        for key in [0, 1].map(key) {
            let queue = key.queue_parts(self.layout).concat();
            look.cmd("GET").arg(key.in_redis());
            look.cmd("PTTL").arg(key.in_redis());
            look.cmd("ZRANGE").arg(queue).arg(0).arg(-1);
        }
        look.cmd("PTTL").arg(value_key().in_redis());
        let time = redis::cmd("TIME").get_packed_command();
        let [multi, exec] = ["MULTI", "EXEC"].map(|name| redis::cmd(name).get_packed_command());
        let look = look.get_packed_pipeline();
        let transaction = [&multi, &time, &request, &look, &time, &exec].map(|part| &part[..]);
        self.connection
            .send_packed_command(&transaction.concat())
            .unwrap();
        let results = loop {
            match self.connection.recv_response().unwrap() {
                Value::Array(results) => break results,
                // The replies `OK` to MULTI and `QUEUED` to each command.
                Value::Okay | Value::SimpleString(_) => {}
                other => panic!("{other:?}"),
            }
        };
        let published = self.published();
        let [begun, reply, looked @ .., ended] = &results[..] else {
            panic!("{results:?}");
        };
        let time = |value| time_of(redis::from_redis_value_ref(value).unwrap());
        let (before, after): (MonotonicTime, MonotonicTime) = (time(begun), time(ended));
        if after.since(before) >= GRAIN {
            return None;
        }
        let reply = match scripts::decode(kind, 1, reply.clone()) {
            Decoded::Outcomes(mut outcomes) => outcomes.remove(0),
            Decoded::Unexpected(error) | Decoded::OutcomeUnknown(error) => Err(error),
            _ => unreachable!("one key, and the script's text is sent"),
        };
        let left: i64 = redis::from_redis_value_ref(&looked[6]).unwrap();
        let ms = u64::try_from(left).ok();
        let value = (
            left != -2,
            ms.map(|ms| before.after(Duration::from_millis(ms))),
        );
        let looked = [0, 1].map(|n| Looked::of(&looked[3 * n..][..3], before));
        Some(Found {
            reply,
            published,
            looked,
            value,
            before,
            after,
        })
    }

    fn request(
        &mut self,
        scripts: &Scripts,
        kind: ScriptKind,
        by: &HolderId,
        command: &Command,
    ) -> Vec<u8> {
        let key = command.key().map_or("", Key::in_redis);
        let value = redis::cmd("GET").arg(key).query(&mut self.connection);
        // A value that is not text cannot be a lock.
        let command = &with_right_token(command, value.unwrap_or(None::<String>).as_deref());
        let names = ScriptContext::new(by.clone(), "p:", self.layout, 1 << 20);
        names.set_shard_slot(self.shard_slot);
        let mut bytes = Vec::new();
        let call = ScriptRef::Text(&scripts.0[kind as usize]);
        scripts::encode(&mut bytes, call, kind, &names, [command].into_iter());
        bytes
    }

    /// A message with the plain channel in place of the shard channel. A client that listens to its shard channel gets
    /// all messages there.
    fn as_plain(&self, kind: &str, channel: &str, text: &str) -> String {
        let Some(slot) = self.shard_slot else {
            return format!("{channel}: {text}");
        };
        let plain = channel.replace(slot.tag(), "");
        let listens_to_shards = !plain.ends_with(CLIENTS[0]);
        assert_eq!(kind == "smessage", listens_to_shards, "{channel}");
        format!("{plain}: {text}")
    }

    fn put_back(&mut self, by: Duration) {
        let now = self.time().since(MonotonicTime::at_tick(0)).as_micros() as u64;
        let last: Option<u64> = redis::cmd("GET")
            .arg(self.fence_counter())
            .query(&mut self.connection)
            .unwrap();
        let ahead = last.unwrap_or(0).max(now) + by.as_micros() as u64;
        redis::cmd("SET")
            .arg(self.fence_counter())
            .arg(ahead)
            .exec(&mut self.connection)
            .unwrap();
    }

    fn time(&mut self) -> MonotonicTime {
        time_of(redis::cmd("TIME").query(&mut self.connection).unwrap())
    }

    /// The messages since the last call.
    fn published(&mut self) -> Vec<String> {
        let ping = redis::cmd("PING").get_packed_command();
        self.subscriber.send_packed_command(&ping).unwrap();
        let mut published = Vec::new();
        loop {
            let Value::Array(words) = self.subscriber.recv_response().unwrap() else {
                panic!("a subscriber is answered with arrays");
            };
            let words: Vec<String> = words
                .iter()
                .map(|word| redis::from_redis_value_ref(word).unwrap())
                .collect();
            match words.as_slice() {
                [pong, ..] if pong == "pong" => return published,
                [_, _, _, _] => {}
                [kind, channel, text] => published.push(self.as_plain(kind, channel, text)),
                other => panic!("{other:?}"),
            }
        }
    }
}

/// The keyspace in memory, and its token for each token of Redis.
#[derive(Clone, Default)]
struct Twin {
    keyspace: Keyspace,
    tokens: HashMap<u64, u64>,
    greatest: (u64, u64),
}

impl Twin {
    /// Runs the command on the keyspace. Fails with the difference from Redis.
    fn follow(
        &mut self,
        found: &Found,
        by: &HolderId,
        command: &Command,
        asked_at: MonotonicTime,
        looked_at: [MonotonicTime; 3],
    ) -> Result<(), String> {
        let mut notifications = Vec::new();
        let listens = |holder: &HolderId| CLIENTS[..CLIENTS.len() - 1].contains(&holder.as_str());
        let mut step = Step {
            now: asked_at,
            by,
            listens: &listens,
            notifications: &mut notifications,
        };
        let value = command
            .key()
            .and_then(|key| self.keyspace.text(key, &mut step));
        let command = with_right_token(command, value.as_deref());
        let reply = self.keyspace.execute(&command, &mut step);
        let texts = [0, 1].map(|n| {
            step.now = looked_at[n];
            self.keyspace.text(&key(n), &mut step)
        });
        step.now = looked_at[2];
        let value = self.keyspace.contains(&value_key(), &mut step);
        let slack = found.after.since(found.before) + 2 * GRAIN;
        if !self.same_reply(&found.reply, &reply, slack) {
            return Err(format!("Redis says {:?}, memory {reply:?}", found.reply));
        }
        for reply in [&found.reply, &reply] {
            if let (
                Command::Acquire {
                    above: Some(above), ..
                },
                Ok(Reply::Granted { token }),
            ) = (&command, reply)
                && token >> 10 < above.least_micros()
            {
                return Err(format!("{token} is not above {above:?}"));
            }
        }
        for (n, (looked, text)) in found.looked.iter().zip(texts).enumerate() {
            let (value, queue, own) = (&looked.value, &looked.queue, self.keyspace.queue(&key(n)));
            if *queue != own {
                return Err(format!("Redis queues {queue:?}, memory {own:?}"));
            }
            if !self.same_value(value.as_deref(), text.as_deref()) {
                return Err(format!("Redis has {value:?}, memory {text:?}"));
            }
            let Some(end) = looked.end else { continue };
            let own = self.keyspace.expires_at(&key(n));
            if own.is_none_or(|own| own.since(end) + end.since(own) > slack) {
                return Err(format!("Redis keeps {n} until {end:?}, memory {own:?}"));
            }
            self.keyspace.expire_at(&key(n), end);
        }
        let end = self.keyspace.expires_at(&value_key());
        let value = (value, end);
        let is_same = match (found.value.1, end) {
            (Some(end), Some(own)) => own.since(end) + end.since(own) <= slack,
            _ => value == found.value,
        };
        if !is_same {
            return Err(format!(
                "Redis has the value {:?}, memory {value:?}",
                found.value
            ));
        }
        if let Some(end) = found.value.1 {
            self.keyspace.expire_at(&value_key(), end);
        }
        let in_memory: Vec<String> = notifications
            .iter()
            .filter_map(|one| self.published(one))
            .collect();
        if found.published != in_memory {
            return Err(format!(
                "Redis tells {:?}, memory {in_memory:?}",
                found.published
            ));
        }
        Ok(())
    }

    /// Whether both tokens belong to the same grant. A new token has to be the greatest so far.
    fn same_token(&mut self, redis: u64, memory: u64) -> bool {
        if let Some(known) = self.tokens.get(&redis) {
            return *known == memory;
        }
        let rises = redis > self.greatest.0 && memory > self.greatest.1;
        self.tokens.insert(redis, memory);
        self.greatest = (redis, memory);
        rises
    }

    fn same_reply(
        &mut self,
        redis: &Result<Reply, Error>,
        memory: &Result<Reply, Error>,
        slack: Duration,
    ) -> bool {
        let near = |one: &Duration, other: &Duration| one.abs_diff(*other) <= slack;
        match (redis, memory) {
            (Ok(Reply::Granted { token }), Ok(Reply::Granted { token: own })) => {
                self.same_token(*token, *own)
            }
            (
                Ok(Reply::Contended { expires_in, queued }),
                Ok(Reply::Contended {
                    expires_in: left,
                    queued: own,
                }),
            ) => near(expires_in, left) && same_place(*queued, *own),
            (Ok(Reply::Adopted { expires_in }), Ok(Reply::Adopted { expires_in: left })) => {
                near(expires_in, left)
            }
            (
                Ok(Reply::Found { value, expires_in }),
                Ok(Reply::Found {
                    value: own,
                    expires_in: left,
                }),
            ) => {
                let near = expires_in.zip(*left).is_some_and(|(a, b)| near(&a, &b));
                let same = (value.lease, &value.holder, value.queued)
                    == (own.lease, &own.holder, own.queued);
                near && same && self.same_token(value.token, own.token)
            }
            (Ok(one), Ok(other)) => one == other,
            (Err(one), Err(other)) => one.kind() == other.kind(),
            _ => false,
        }
    }

    fn same_value(&mut self, redis: Option<&str>, memory: Option<&str>) -> bool {
        let (Some(redis), Some(memory)) = (redis, memory) else {
            return redis == memory;
        };
        let read = |text: &str| LockValue::parse(text.as_bytes(), 0);
        let (Some(one), Some(own)) = (read(redis), read(memory)) else {
            return redis == memory;
        };
        (one.lease, one.holder) == (own.lease, own.holder)
            && has_queue(redis.as_bytes()) == has_queue(memory.as_bytes())
            && self.same_token(one.token, own.token)
    }

    /// The message that scripts publish for a notification.
    fn published(&self, notification: &Notification) -> Option<String> {
        let text = |to: &HolderId, lease: &dyn Display, what: &str, key: &Key| {
            Some(format!("p:~to:{to}: {lease} {what} {}", key.in_redis()))
        };
        match notification {
            Notification::Granted {
                to,
                key,
                lease,
                grant,
            } => {
                let of_redis = self.tokens.iter().find(|(_, own)| **own == grant.token);
                let micros = of_redis.map_or(0, |(token, _)| token >> 10);
                let mark = if grant.to_confirm { "?" } else { "" };
                text(to, lease, &format!("{mark}{micros}"), key)
            }
            Notification::Near { to, key, lease } if to.as_str() != CLIENTS[2] => {
                text(to, lease, "~", key)
            }
            Notification::Forced { to, key, lease, by } if to.as_str() != CLIENTS[2] => {
                text(to, lease, &format!("!{by}"), key)
            }
            _ => None,
        }
    }
}

/// Whether both places are the same, except for the difference of the clocks.
fn same_place(redis: Option<Queued>, memory: Option<Queued>) -> bool {
    let place = |queued: Option<Queued>| {
        let is_asked_for = |since: &u64| *since < FIRST_USUAL_PLACE + 1000;
        queued.map(|Queued { ahead, since }| (ahead, Some(since).filter(is_asked_for)))
    };
    place(redis) == place(memory)
}

fn time_of((secs, micros): (u64, u64)) -> MonotonicTime {
    MonotonicTime::at_tick(secs * 1000 + micros / 1000)
}
