//! Sends the same commands to a real Redis and to a keyspace in memory, and compares replies, values and notifications.

use std::any::Any;
use std::collections::{BTreeSet, HashMap};
use std::fmt::Display;
use std::time::Duration;

use leasehold_testbed::{Cluster, Server};
use redis::{Connection, Value};

use super::histories::{
    Age, CLIENTS, COUNTED, Operation, QUARANTINE, Subject, holder, key, value_key, with_right_token,
};
use crate::command;
use crate::command::SCRIPTS;
use crate::command::keyspace::{Keyspace, Notification, Step};
use crate::command::keyspace::{Mark, clock_micros};
use crate::command::script::{Script, strip_comments};
use crate::command::value::{LockValue, doubt_of, has_queue, micros_of, token_of};
use crate::command::{
    Acquire, Command, FIRST_USUAL_PLACE, FoundShare, FoundShares, Hold, Mode, QueuePlace, Release,
    Reply,
};
use crate::config::key;
use crate::config::key::{Key, KeyLayout};
use crate::report::error::Error;
use crate::util::clock::MonotonicTime;
use crate::util::id::HolderId;
use crate::util::slot::Slot;
use crate::wire::scripts;
use crate::wire::scripts::plain;
use crate::wire::scripts::plain::KeyOutcome;
use crate::wire::scripts::{Decoded, ScriptContext, ScriptRef};

/// The texts of all scripts, and of the data check. A test may plant a difference in one of them.
pub struct Scripts(Vec<String>, String);

impl Scripts {
    pub fn real() -> Self {
        let texts = SCRIPTS.map(|script| script.text().to_owned());
        Self(texts.to_vec(), scripts::data_check().to_owned())
    }

    /// The scripts with a first line that makes Redis 7 refuse them access to a second slot.
    pub fn of_one_slot() -> Self {
        let Self(texts, data_check) = Self::real();
        let strict = |text: String| format!("#!lua\n{text}");
        Self(texts.into_iter().map(strict).collect(), data_check)
    }

    pub fn are_strict(&self) -> bool {
        self.0[0].starts_with("#!")
    }

    /// Replaces `from` by `to` in a script, in each place where it occurs.
    pub fn planted(script: &Script, from: &str, to: &str) -> Self {
        let mut scripts = Self::real();
        plant(&mut scripts.0[command::place(script)], from, to);
        scripts
    }

    pub fn planted_in_data_check(from: &str, to: &str) -> Self {
        let mut scripts = Self::real();
        plant(&mut scripts.1, from, to);
        scripts
    }
}

fn plant(text: &mut String, from: &str, to: &str) {
    let (from, to) = (strip_comments(from), strip_comments(to));
    assert!(text.contains(&from), "{text} has {from:?}");
    *text = text.replace(&from, &to);
}

pub struct Redis {
    connection: Connection,
    subscriber: Connection,
    layout: KeyLayout,
    shard_slot: Option<Slot>,
    /// The run id of the server's process.
    run_id: String,
    /// A [`Server`] or a [`Cluster`].
    _server: Box<dyn Any>,
}

/// Redis rounds times to whole milliseconds. The test does not compare a step that takes longer than this.
const GRAIN: Duration = Duration::from_millis(2);
/// How often a history may run. The test repeats it until each step takes less than [`GRAIN`].
const RUNS: usize = 100;

/// The reply of Redis and its state after a step.
struct Found {
    reply: Result<Reply, Error>,
    published: Vec<String>,
    looked: [Looked; 2],
    /// Whether the fenced value exists, and when it expires.
    value: (bool, Option<MonotonicTime>),
    /// The fence counter and the mark. `None` on a single server.
    node: Option<(Option<u64>, Option<Mark>)>,
    /// The µs part of the token in a hold.
    held: Option<u64>,
    /// The exact times before and after the command. `before` and `after` are rounded to milliseconds.
    command: [MonotonicTime; 2],
    before: MonotonicTime,
    after: MonotonicTime,
}

/// The state of a key after a step.
struct Looked {
    value: Option<String>,
    /// The members of a key that leases share, with their ends, sorted.
    shares: Vec<(String, MonotonicTime)>,
    /// When the key expires.
    end: Option<MonotonicTime>,
    /// The waiters of the key's queue.
    queue: Vec<String>,
}

impl Looked {
    fn of(results: &[Value], at: MonotonicTime) -> Self {
        let [value, left, queue, shares] = results else {
            panic!("{results:?}");
        };
        let left: i64 = redis::from_redis_value_ref(left).unwrap();
        let left = u64::try_from(left).ok();
        let shares: Vec<(String, u64)> = redis::from_redis_value_ref(shares).unwrap();
        let ends = |(member, end)| (member, end_of(MonotonicTime::at_tick(end), 0));
        let mut shares: Vec<_> = shares.into_iter().map(ends).collect();
        shares.sort();
        Self {
            value: redis::from_redis_value_ref(value).unwrap(),
            shares,
            end: left.map(|left| end_of(at, left)),
            queue: redis::from_redis_value_ref(queue).unwrap(),
        }
    }
}

/// The value of a key, or nothing if it is no string.
const GET_STRING: &str =
    "return redis.call('TYPE', KEYS[1]).ok == 'string' and redis.call('GET', KEYS[1])";
/// The members and scores of a key, or nothing if it is no sorted set.
const GET_SHARES: &str = "return redis.call('TYPE', KEYS[1]).ok == 'zset' \
    and redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES') or {}";
/// Changes the ttl of a sorted set. Redis before 7.0 cannot do so exactly.
const SHIFT: &str = "local till = redis.pcall('PEXPIRETIME', KEYS[1])
    if redis.call('TYPE', KEYS[1]).ok ~= 'zset' or type(till) ~= 'number' then return 0 end
    return redis.call('PEXPIREAT', KEYS[1], till + ARGV[1])";

impl Redis {
    pub fn start() -> Self {
        let server = Server::start().unwrap();
        Self::on(&server.url(), Box::new(server), KeyLayout::Single, None)
    }

    /// A node that serves all slots of a Cluster. `slot` names its shard channels.
    pub fn start_cluster_node(slot: Option<Slot>) -> Self {
        let builder = Cluster::builder().masters(1).without_replicas();
        let cluster = builder.start().unwrap();
        let url = cluster.nodes()[0].url();
        Self::on(&url, Box::new(cluster), KeyLayout::Slots, slot)
    }

    fn on(url: &str, server: Box<dyn Any>, layout: KeyLayout, shard_slot: Option<Slot>) -> Self {
        let client = redis::Client::open(url).unwrap();
        let mut connection = client.get_connection().unwrap();
        let info = redis::cmd("INFO").arg("server").query(&mut connection);
        let info: String = info.unwrap();
        let run_id = info.lines().find_map(|line| line.strip_prefix("run_id:"));
        let run_id = run_id.unwrap().to_owned();
        let mut subscriber = client.get_connection().unwrap();
        // All clients but the last one listen. Another connection subscribes to all channels and records the messages.
        let names = &CLIENTS[..CLIENTS.len() - 1];
        let channels = names
            .iter()
            .map(|name| ("SUBSCRIBE", format!("p:~to:{name}")));
        let mut channels: Vec<_> = channels.chain([("PSUBSCRIBE", "*".to_owned())]).collect();
        if let Some(slot) = shard_slot {
            // The first client does not subscribe to its shard channel, like a client that does not know yet that slots
            // have moved.
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
            run_id,
            _server: server,
        }
    }

    /// Whether the server can refuse scripts access to a second slot: Redis 7 and later.
    pub fn knows_strict_scripts(&mut self) -> bool {
        let mut strict = redis::cmd("EVAL");
        strict.arg("#!lua\nreturn 1").arg(0);
        strict.exec(&mut self.connection).is_ok()
    }

    fn fence_counter(&self) -> String {
        key::fence_counter("p:") + key(0).fence_tag(self.layout)
    }

    /// Runs a history on Redis and on the keyspace, and returns the first difference as an error. If a step takes too
    /// long on a busy machine, the test does not know when keys expired, and runs the history again.
    pub fn compare(
        &mut self,
        subject: Subject,
        scripts: &Scripts,
        history: &[Operation],
    ) -> Result<(), String> {
        let mut runs = std::iter::repeat_with(|| self.compare_once(subject, scripts, history));
        let compared = runs.by_ref().take(RUNS).flatten().next();
        compared.expect("Redis is not stopped in one of the history's runs")
    }

    /// Runs the history once. Returns `None` if a step took too long.
    fn compare_once(
        &mut self,
        subject: Subject,
        scripts: &Scripts,
        history: &[Operation],
    ) -> Option<Result<(), String>> {
        redis::cmd("FLUSHALL").exec(&mut self.connection).unwrap();
        let mut twin = Twin::default();
        for (n, operation) in history.iter().enumerate() {
            if let Err(how) = self.step(subject, scripts, &mut twin, operation)? {
                return Some(Err(format!("step {n}: {how}")));
            }
        }
        Some(Ok(()))
    }

    /// Runs one operation on Redis and on the keyspace. Returns `None` if the operation took too long.
    fn step(
        &mut self,
        subject: Subject,
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
            Operation::Shift(key, ahead) => {
                let mut shift = redis::cmd("EVAL");
                shift.arg(SHIFT).arg(1).arg(key.in_redis()).arg(*ahead);
                let is_shifted: bool = shift.query(&mut self.connection).unwrap();
                if is_shifted {
                    twin.keyspace.shift(key, *ahead);
                }
                return Some(Ok(()));
            }
            Operation::PutBack(by) => {
                self.put_back(*by);
                twin.keyspace.put_back(*by);
                return Some(Ok(()));
            }
            Operation::LoseCounter => {
                self.lose_counter();
                return Some(Ok(()));
            }
            Operation::Count => {
                let mut count = redis::cmd("ZADD");
                count.arg(self.fence_counter()).arg(COUNTED).arg("t");
                count.exec(&mut self.connection).unwrap();
                twin.keyspace.set_counter(COUNTED);
                return Some(Ok(()));
            }
            Operation::Mark(mark) => {
                let mark = mark.map(|(is_old, age)| Mark {
                    is_old,
                    since: self.time_of_age(age),
                });
                self.set_mark(mark);
                twin.keyspace.set_mark(mark.map(mark_in_memory));
                return Some(Ok(()));
            }
            Operation::Ask { by, command, .. } => (holder(*by), Some(command)),
            Operation::LogIn => (holder(0), None),
        };
        if let Some(Command::Acquire(Acquire {
            key,
            lease,
            mode: Mode::Exclusive,
            ..
        })) = command
        {
            // The token of this lock cannot be used. The script deletes the key and grants it again.
            let mut get = redis::cmd("GET");
            let value: Option<Vec<u8>> = get
                .arg(key.in_redis())
                .query(&mut self.connection)
                .unwrap_or(None);
            let stored = value.and_then(|value| LockValue::parse(&value, 0));
            if stored.is_some_and(|stored| stored.lease == *lease && stored.token.is_none()) {
                twin.keyspace.remove(key);
            }
        }
        let is_plain = matches!(operation, Operation::Ask { is_plain: true, .. });
        let tried = command.filter(|command| is_plain && plain::can_grant(command));
        let tried = tried.map(|command| self.acquire_plain(&by, command));
        let found = self.find(subject, scripts, &by, command, tried)?;
        // A key may have expired before the command, between the command and the reads, or not at all. The keyspace has
        // to agree with Redis in one of these cases.
        let [first, last] = [found.before.before(GRAIN), found.after.after(GRAIN)];
        // A quarantine ends at a microsecond, so it may also end between the two exact times of the command.
        let [begun, ended] = found.command;
        let asked_at = [first, last, found.before, found.after, begun, ended];
        let mut differences = BTreeSet::new();
        for asked_at in asked_at {
            for choice in 0..8 {
                let mut next = twin.clone();
                let looked_at = [0, 1, 2].map(|n| if choice >> n & 1 == 0 { first } else { last });
                match next.follow(&found, &by, command, asked_at, looked_at) {
                    Ok(()) => {
                        *twin = next;
                        return Some(Ok(()));
                    }
                    Err(difference) => _ = differences.insert(difference),
                }
            }
        }
        let differences: Vec<String> = differences.into_iter().collect();
        Some(Err(differences.join("; or ")))
    }

    /// Runs the command and reads the keys in one transaction. Returns `None` if the transaction took too long.
    fn find(
        &mut self,
        subject: Subject,
        scripts: &Scripts,
        by: &HolderId,
        command: Option<&Command>,
        tried: Option<(MonotonicTime, KeyOutcome)>,
    ) -> Option<Found> {
        let script = command.map(|command| command.script().unwrap());
        let mut held = None;
        let request = match command.zip(script) {
            // Plain commands have carried out the acquire.
            Some(_) if matches!(tried, Some((_, KeyOutcome::Granted(_)))) => {
                redis::cmd("TIME").get_packed_command()
            }
            Some((command, script)) => {
                let (request, sent) = self.request(subject, scripts, script, by, command);
                held = match sent {
                    Command::Hold(Hold { micros, .. }) => Some(micros),
                    Command::Release(Release {
                        held: Some(held),
                        min_hold,
                        ..
                    }) if !min_hold.is_zero() => Some(micros_of(held.token)),
                    _ => None,
                };
                request
            }
            None => {
                let mut log_in = redis::cmd("EVAL");
                log_in.arg(&scripts.1).arg(1).arg(key::data_mark("p:"));
                let quarantine = QUARANTINE.as_millis() as u64;
                log_in.arg(quarantine).get_packed_command()
            }
        };
        let mut look = redis::pipe();
        for key in [0, 1].map(key) {
            let queue = key.queue_parts(self.layout).concat();
            look.cmd("EVAL").arg(GET_STRING).arg(1).arg(key.in_redis());
            look.cmd("PTTL").arg(key.in_redis());
            look.cmd("ZRANGE").arg(queue).arg(0).arg(-1);
            look.cmd("EVAL").arg(GET_SHARES).arg(1).arg(key.in_redis());
        }
        look.cmd("PTTL").arg(value_key().in_redis());
        if subject == Subject::Votes {
            look.cmd("ZSCORE").arg(self.fence_counter()).arg("t");
            look.cmd("GET").arg(key::data_mark("p:"));
        }
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
                // The replies to MULTI and to each queued command.
                Value::Okay | Value::SimpleString(_) => {}
                other => panic!("{other:?}"),
            }
        };
        let published = self.published();
        let [begun, reply, looked @ .., ended] = &results[..] else {
            panic!("{results:?}");
        };
        let command =
            [begun, ended].map(|time| exact_time_of(redis::from_redis_value_ref(time).unwrap()));
        let time = |value| time_of(redis::from_redis_value_ref(value).unwrap());
        let (before, after): (MonotonicTime, MonotonicTime) = (time(begun), time(ended));
        let before = tried.map_or(before, |(begun, _)| begun);
        if after.since(before) >= GRAIN {
            return None;
        }
        let reply = match script {
            None => Ok(data_check_reply(reply)),
            Some(_) if let Some((_, KeyOutcome::Granted(token))) = tried => Ok(Reply::Granted {
                token,
                is_token_in_value: false,
            }),
            Some(script) => match scripts::decode(script, 1, reply.clone(), "p:") {
                Decoded::Outcomes(mut outcomes) => outcomes.remove(0),
                Decoded::Unexpected(error) | Decoded::OutcomeUnknown(error) => Err(error),
                _ => unreachable!("one key, and the script's text is sent"),
            },
        };
        let left: i64 = redis::from_redis_value_ref(&looked[8]).unwrap();
        let ms = u64::try_from(left).ok();
        let value = (left != -2, ms.map(|ms| end_of(before, ms)));
        let text =
            |n: usize| -> Option<String> { redis::from_redis_value_ref(looked.get(n)?).unwrap() };
        let node = (subject == Subject::Votes).then(|| {
            let counter = text(9).map(|counter| counter.parse().unwrap());
            let mark = text(10).map(|mark| {
                let (run_id, since) = mark.split_once(' ').unwrap();
                Mark {
                    is_old: run_id != self.run_id,
                    since: since.parse().unwrap(),
                }
            });
            (counter, mark)
        });
        let looked = [0, 1].map(|n| Looked::of(&looked[4 * n..][..4], before));
        Some(Found {
            reply,
            published,
            looked,
            value,
            node,
            held,
            command,
            before,
            after,
        })
    }

    fn request(
        &mut self,
        subject: Subject,
        scripts: &Scripts,
        script: &Script,
        by: &HolderId,
        command: &Command,
    ) -> (Vec<u8>, Command) {
        let key = command.key().map_or("", Key::in_redis);
        let value = redis::cmd("GET").arg(key).query(&mut self.connection);
        // A value that is not text cannot be a lock.
        let mut command = with_right_token(command, value.unwrap_or(None::<String>).as_deref());
        if let Command::Release(Release {
            held: Some(held),
            min_hold,
            ..
        }) = &mut command
            && !min_hold.is_zero()
        {
            let now = self.time().since(MonotonicTime::at_tick(0)).as_micros() as u64;
            held.token = token_of(now - held.token * 1000);
        }
        let mut names = ScriptContext::new(by.clone(), "p:", self.layout, 1 << 20);
        if subject == Subject::Votes {
            names.quarantine = Some(QUARANTINE);
        }
        names.set_shard_slot(self.shard_slot);
        let mut bytes = Vec::new();
        let call = ScriptRef::Text(&scripts.0[command::place(script)]);
        scripts::encode(&mut bytes, call, script, &names, [&command].into_iter());
        (bytes, command)
    }

    /// Tries an acquire with plain commands, as a connection does before it calls the script. Also returns the time of
    /// Redis before.
    fn acquire_plain(&mut self, by: &HolderId, command: &Command) -> (MonotonicTime, KeyOutcome) {
        let begun = self.time();
        let context = ScriptContext::new(by.clone(), "p:", self.layout, 1 << 20);
        let commands = [command].into_iter();
        let clock = begun.since(MonotonicTime::at_tick(0)).as_micros() as u64;
        let mut bytes = Vec::new();
        let asks_time = clock.is_multiple_of(2);
        let before =
            plain::encode_acquires(&mut bytes, &context, commands.clone(), clock, asks_time);
        self.connection.send_packed_command(&bytes).unwrap();
        for _ in 0..before {
            self.connection.recv_response().unwrap();
        }
        let reply = self.connection.recv_response().unwrap();
        let acquires = plain::decode_acquires(commands, asks_time, true, &reply).unwrap();
        (begun, acquires.outcomes[0])
    }

    /// Deletes the fence counter, unless it is later than the clock: tokens would become smaller.
    fn lose_counter(&mut self) {
        let now = self.time().since(MonotonicTime::at_tick(0)).as_micros() as u64;
        let mut last = redis::cmd("ZSCORE");
        last.arg(self.fence_counter()).arg("t");
        let last: Option<u64> = last.query(&mut self.connection).unwrap();
        if last.is_some_and(|last| last <= now) {
            let mut delete = redis::cmd("DEL");
            delete.arg(self.fence_counter());
            delete.exec(&mut self.connection).unwrap();
        }
    }

    /// Formats a message with the plain channel in place of the shard channel, since the keyspace knows only plain
    /// channels. A client that listens to its shard channel gets all messages there.
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
        let last: Option<u64> = redis::cmd("ZSCORE")
            .arg(self.fence_counter())
            .arg("t")
            .query(&mut self.connection)
            .unwrap();
        let ahead = last.unwrap_or(0).max(now) + by.as_micros() as u64;
        redis::cmd("ZADD")
            .arg(self.fence_counter())
            .arg(ahead)
            .arg("t")
            .exec(&mut self.connection)
            .unwrap();
    }

    /// The time in µs for a mark of this age.
    fn time_of_age(&mut self, age: Age) -> u64 {
        let (secs, micros): (u64, u64) = redis::cmd("TIME").query(&mut self.connection).unwrap();
        let now = secs * 1_000_000 + micros;
        match age {
            Age::Past(age) => now - age.as_micros() as u64,
            Age::Future => now + 3_600_000_000,
        }
    }

    fn set_mark(&mut self, mark: Option<Mark>) {
        let run_id = |mark: Mark| if mark.is_old { "0" } else { &*self.run_id };
        let text = mark.map(|mark| format!("{} {}", run_id(mark), mark.since));
        let key = key::data_mark("p:");
        let command = match text {
            Some(text) => redis::cmd("SET").arg(key).arg(text).clone(),
            None => redis::cmd("DEL").arg(key).clone(),
        };
        command.exec(&mut self.connection).unwrap();
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
    /// Runs the command on the keyspace, and returns a difference from Redis as an error.
    fn follow(
        &mut self,
        found: &Found,
        by: &HolderId,
        command: Option<&Command>,
        asked_at: MonotonicTime,
        looked_at: [MonotonicTime; 3],
    ) -> Result<(), String> {
        let mut notifications = Vec::new();
        let listens = |holder: &HolderId| CLIENTS[..CLIENTS.len() - 1].contains(&holder.as_str());
        let mut step = Step {
            now: asked_at,
            by,
            // A keyspace without a quarantine acts as a single server.
            quarantine: found.node.map_or(Duration::ZERO, |_| QUARANTINE),
            ahead: 0,
            listens: &listens,
            notifications: &mut notifications,
        };
        let value = command
            .and_then(Command::key)
            .and_then(|key| self.keyspace.text(key, &mut step));
        let mut command = command.map(|command| with_right_token(command, value.as_deref()));
        if let (Some(Command::Hold(Hold { micros, .. })), Some(held)) = (&mut command, found.held) {
            // Redis or the keyspace may have removed the key since the test read its token.
            let own = self.tokens.get(&(held << 10));
            *micros = own.map_or(held, |own| own >> 10);
        }
        if let (
            Some(Command::Release(Release {
                held: Some(held),
                min_hold,
                ..
            })),
            Some(micros),
        ) = (&mut command, found.held)
            && !min_hold.is_zero()
        {
            // The clock of the keyspace has another start.
            held.token = token_of(clock_micros(MonotonicTime::at_tick(0)) + micros);
        }
        let reply = match &command {
            Some(command) => self.keyspace.execute(command, &mut step),
            None => Ok(Reply::Abstained {
                for_another: self.keyspace.check_data(&step),
            }),
        };
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
            let (shares, own) = (&looked.shares, self.keyspace.shares(&key(n)));
            let is_near = |(one, other): (&(String, MonotonicTime), &(String, MonotonicTime))| {
                one.0 == other.0 && one.1.since(other.1) + other.1.since(one.1) <= slack
            };
            if shares.len() != own.len() || !shares.iter().zip(&own).all(is_near) {
                return Err(format!("Redis has the shares {shares:?}, memory {own:?}"));
            }
            if !own.is_empty() {
                self.keyspace.end_shares_at(&key(n), shares);
                continue;
            }
            self.keyspace.expire_at(&key(n), end);
        }
        if let Some((counter, mark)) = found.node {
            let own = Some(self.keyspace.counter()).filter(|own| *own > 0);
            let is_same = match (counter, own) {
                (Some(counter), Some(own)) => self.same_token(counter << 10, own << 10),
                _ => counter == own,
            };
            if !is_same {
                return Err(format!("Redis counts {counter:?}, memory {own:?}"));
            }
            let (mark, own) = (mark.map(mark_in_memory), self.keyspace.mark());
            let is_near = |one: Mark, other: Mark| {
                let apart = Duration::from_micros(one.since.abs_diff(other.since));
                one.is_old == other.is_old && apart <= slack
            };
            if mark != own && !mark.zip(own).is_some_and(|(mark, own)| is_near(mark, own)) {
                return Err(format!("Redis has the mark {mark:?}, memory {own:?}"));
            }
            self.keyspace.set_mark(mark);
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
        // The value of a key that leases share has no token, so only the messages show those of their grants.
        let given = found.published.iter().filter_map(|text| {
            let micros = text.split(' ').nth(2)?;
            micros.trim_start_matches('?').parse::<u64>().ok()
        });
        let own = notifications.iter().filter_map(|one| match one {
            Notification::Granted { grant, .. } => Some(grant.token),
            _ => None,
        });
        for (micros, own) in given.zip(own) {
            self.tokens.entry(micros << 10).or_insert(own);
            self.greatest.0 = self.greatest.0.max(micros << 10);
            self.greatest.1 = self.greatest.1.max(own);
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

    /// Whether both tokens belong to the same grant. The token of a new grant has to be the greatest so far.
    fn same_token(&mut self, redis: u64, memory: u64) -> bool {
        if let Some(known) = self.tokens.get(&redis) {
            return *known == memory;
        }
        // A hold may set a key with the token of an old grant.
        let was_given = redis == memory;
        let (last, own_last) = self.greatest;
        self.tokens.insert(redis, memory);
        self.greatest = (redis.max(last), memory.max(own_last));
        was_given || redis > last && memory > own_last
    }

    /// Compares the tokens in two values. After a grant by plain commands, the value of Redis has no token.
    fn same_stored(&mut self, redis: Option<u64>, memory: Option<u64>) -> bool {
        redis.is_none_or(|redis| memory.is_some_and(|memory| self.same_token(redis, memory)))
    }

    fn same_reply(
        &mut self,
        redis: &Result<Reply, Error>,
        memory: &Result<Reply, Error>,
        slack: Duration,
    ) -> bool {
        let near = |one: &Duration, other: &Duration| one.abs_diff(*other) <= slack;
        match (redis, memory) {
            (Ok(Reply::Granted { token, .. }), Ok(Reply::Granted { token: own, .. })) => {
                self.same_token(*token, *own)
            }
            (
                Ok(Reply::Contended {
                    expires_in,
                    queued,
                    shared,
                }),
                Ok(Reply::Contended {
                    expires_in: left,
                    queued: own,
                    shared: own_shared,
                }),
            ) => {
                near(expires_in, left)
                    && same_place(*queued, *own)
                    && shared.is_some() == own_shared.is_some()
            }
            // All shares have ended. A command at this time may have removed them.
            (Ok(Reply::Shared(found)), Ok(Reply::Missing))
            | (Ok(Reply::Missing), Ok(Reply::Shared(found))) => found.taken == 0,
            (Ok(Reply::Shared(found)), Ok(Reply::Shared(own))) => {
                let sorted = |found: &FoundShares| {
                    let mut shares = found.shares.clone();
                    shares.sort_by_key(|share| share.lease);
                    shares
                };
                let is_same = |(one, own): (FoundShare, FoundShare)| {
                    near(&one.expires_in, &own.expires_in)
                        && (one.lease, one.mode, one.holder) == (own.lease, own.mode, own.holder)
                };
                (found.taken, found.queued, found.shares.len())
                    == (own.taken, own.queued, own.shares.len())
                    && sorted(found).into_iter().zip(sorted(own)).all(is_same)
            }
            (
                Ok(Reply::Adopted { expires_in, token }),
                Ok(Reply::Adopted {
                    expires_in: left,
                    token: own,
                }),
            ) => near(expires_in, left) && self.same_token(*token, *own),
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
                near && same && self.same_stored(value.token, own.token)
            }
            (Ok(Reply::LockAndValue(found)), Ok(Reply::LockAndValue(own))) => {
                let same_lock = match (&found.lock, &own.lock) {
                    (Some((value, Some(left))), Some((own, Some(own_left)))) => {
                        let same = (value.lease, &value.holder) == (own.lease, &own.holder);
                        same && near(left, own_left) && self.same_stored(value.token, own.token)
                    }
                    (None, None) => true,
                    _ => false,
                };
                same_lock && (found.token, &found.value) == (own.token, &own.value)
            }
            (Ok(Reply::Abstained { for_another }), Ok(Reply::Abstained { for_another: own })) => {
                near(for_another, own)
            }
            (Ok(Reply::TooLate { micros }), Ok(Reply::TooLate { micros: own })) => {
                // The clock of the memory store counts from its own start.
                let own = own - clock_micros(MonotonicTime::at_tick(0));
                Duration::from_micros(micros.abs_diff(own)) <= slack
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
            && doubt_of(redis.as_bytes()) == doubt_of(memory.as_bytes())
            && self.same_stored(one.token, own.token)
    }

    /// The message that the scripts publish for a notification.
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
                let from_full = self.tokens.iter().find(|(_, own)| **own == grant.token);
                let micros = from_full.map_or(0, |(token, _)| token >> 10);
                let mark = if grant.to_confirm { "?" } else { "" };
                text(to, lease, &format!("{mark}{micros}"), key)
            }
            Notification::Near { to, key, lease } if to.as_str() != CLIENTS[2] => {
                text(to, lease, "~", key)
            }
            Notification::Called { to, key, lease } if to.as_str() != CLIENTS[2] => {
                text(to, lease, "=", key)
            }
            Notification::Forced { to, key, lease, by } if to.as_str() != CLIENTS[2] => {
                text(to, lease, &format!("!{by}"), key)
            }
            _ => None,
        }
    }
}

/// Whether both places are the same, apart from the difference of the clocks.
fn same_place(redis: Option<QueuePlace>, memory: Option<QueuePlace>) -> bool {
    let place = |queued: Option<QueuePlace>| {
        let is_asked_for = |since: &u64| *since < FIRST_USUAL_PLACE + 1000;
        queued.map(|QueuePlace { ahead, since }| (ahead, Some(since).filter(is_asked_for)))
    };
    place(redis) == place(memory)
}

/// Reads the reply of lua/data.lua as a reply `Abstained`. Its time is zero if the node votes.
fn data_check_reply(reply: &Value) -> Reply {
    let (_, left): (String, u64) = redis::from_redis_value_ref(reply).unwrap();
    Reply::Abstained {
        for_another: Duration::from_millis(left),
    }
}

/// Converts a mark of Redis to the clock of the keyspace.
fn mark_in_memory(mark: Mark) -> Mark {
    let since = clock_micros(MonotonicTime::at_tick(0)) + mark.since;
    Mark { since, ..mark }
}

/// The last moment of a key that has `left` ms at `at`: Redis keeps a key until the end of its last millisecond.
fn end_of(at: MonotonicTime, left: u64) -> MonotonicTime {
    let through = Duration::from_millis(1) - Duration::from_nanos(1);
    at.after(Duration::from_millis(left) + through)
}

fn exact_time_of((secs, micros): (u64, u64)) -> MonotonicTime {
    MonotonicTime::at_tick(secs * 1000).after(Duration::from_micros(micros))
}

/// A time of Redis, rounded down to milliseconds: Redis uses such rounded times for the ttl of keys.
fn time_of((secs, micros): (u64, u64)) -> MonotonicTime {
    MonotonicTime::at_tick(secs * 1000 + micros / 1000)
}
