//! Sends the same commands to a real Redis and to a keyspace in memory, and compares replies, values and notifications.

use std::any::Any;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt::Display;
use std::sync::LazyLock;
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
use crate::command::value::{Doubt, LockValue, doubt_of, has_queue, micros_of, token_of};
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

/// All scripts, and the data check. A test may plant a difference in one of them.
pub struct Scripts {
    of_commands: Vec<Loadable>,
    data_check: Loadable,
}

/// The text of a script, and its hash.
#[derive(Clone)]
struct Loadable {
    text: String,
    hash: String,
}

impl Loadable {
    fn new(text: String) -> Self {
        let hash = redis::Script::new(&text).get_hash().to_owned();
        Self { text, hash }
    }

    /// Replaces `from` by `to` in each place where it occurs.
    fn plant(&mut self, from: &str, to: &str) {
        let (from, to) = (strip_comments(from), strip_comments(to));
        assert!(self.text.contains(&from), "{} has {from:?}", self.text);
        *self = Self::new(self.text.replace(&from, &to));
    }
}

impl Scripts {
    pub fn real() -> Self {
        let of_commands = SCRIPTS.map(|script| Loadable {
            text: script.text().to_owned(),
            hash: script.hash().to_owned(),
        });
        Self {
            of_commands: of_commands.to_vec(),
            data_check: Loadable::new(scripts::data_check().to_owned()),
        }
    }

    /// The scripts with a first line that makes Redis 7 refuse them access to a second slot.
    pub fn of_one_slot() -> Self {
        let mut scripts = Self::real();
        for script in &mut scripts.of_commands {
            *script = Loadable::new(format!("#!lua\n{}", script.text));
        }
        scripts
    }

    pub fn are_strict(&self) -> bool {
        self.of_commands[0].text.starts_with("#!")
    }

    /// Replaces `from` by `to` in a script, in each place where it occurs.
    pub fn planted(script: &Script, from: &str, to: &str) -> Self {
        let mut scripts = Self::real();
        scripts.of_commands[command::place(script)].plant(from, to);
        scripts
    }

    pub fn planted_in_data_check(from: &str, to: &str) -> Self {
        let mut scripts = Self::real();
        scripts.data_check.plant(from, to);
        scripts
    }
}

pub struct Redis {
    connection: Connection,
    subscriber: Connection,
    layout: KeyLayout,
    shard_slot: Option<Slot>,
    /// The run id of the server's process.
    run_id: String,
    /// The hashes of the scripts that the server knows.
    loaded: HashSet<String>,
    /// How far the clock of the keyspace is ahead of the clock of Redis: the sum of the ages in this run.
    ahead: Duration,
    /// A [`Server`] or a [`Cluster`].
    _server: Box<dyn Any>,
}

/// Redis rounds times to whole milliseconds. If a step takes longer than this, the test does not know in which order
/// keys expired and the step happened.
const GRAIN: Duration = Duration::from_millis(2);
/// The test runs a history again if one of its steps takes longer than this.
const LONGEST_STEP: Duration = Duration::from_millis(20);
/// How often a history may run. The test repeats a run that found a difference after a step longer than [`GRAIN`].
const RUNS: usize = 1_000;
/// The channel of the message that follows those of a step.
const END_OF_STEP: &str = "end";

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
    /// How far the times below are ahead of the clock of Redis.
    ahead: Duration,
    /// The exact times before and after the command. `before` and `after` are rounded to milliseconds.
    command: [MonotonicTime; 2],
    before: MonotonicTime,
    after: MonotonicTime,
}

/// The state of a key after a step.
struct Looked {
    value: Option<String>,
    /// The members of a key that leases share, with a mark of doubt at their end, and with the ends of the shares.
    /// Sorted.
    shares: Vec<(String, MonotonicTime)>,
    /// When the key expires.
    end: Option<MonotonicTime>,
    /// The waiters of the key's queue.
    queue: Vec<String>,
}

impl Looked {
    fn of(results: &[Value], at: MonotonicTime, ahead: Duration) -> Self {
        let [value, left, queue, shares] = results else {
            panic!("{results:?}");
        };
        let left: i64 = redis::from_redis_value_ref(left).unwrap();
        let left = u64::try_from(left).ok();
        let shares: Vec<(String, f64)> = redis::from_redis_value_ref(shares).unwrap();
        // The fraction of a score marks a share that its waiter has not confirmed.
        let ends = |(member, end): (String, f64)| {
            let doubt = match end.fract() {
                0.5 => Doubt::Unconfirmed.mark(),
                0.75 => Doubt::RollCalled.mark(),
                _ => "",
            };
            let end = MonotonicTime::at_tick(end.floor() as u64);
            (member + doubt, end_of(end.after(ahead), 0))
        };
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

/// Returns four results for each of two keys: its value if it is a string, its ttl, its queue, and its members and
/// scores if it is a sorted set. The ttl of the fenced value follows. KEYS: the keys, their queues, the fenced value.
static LOOK: LazyLock<Loadable> = LazyLock::new(|| {
    Loadable::new(
        "local found = {}
    for n = 1, 2 do
        local key, kind = KEYS[n], redis.call('TYPE', KEYS[n]).ok
        found[#found + 1] = kind == 'string' and redis.call('GET', key)
        found[#found + 1] = redis.call('PTTL', key)
        found[#found + 1] = redis.call('ZRANGE', KEYS[n + 2], 0, -1)
        found[#found + 1] = kind == 'zset' and redis.call('ZRANGE', key, 0, -1, 'WITHSCORES') or {}
    end
    found[#found + 1] = redis.call('PTTL', KEYS[5])
    return found"
            .to_owned(),
    )
});
/// Acts as if ARGV[1] ms had passed: shortens all ttls, and moves the ends of shares, the places of waiters and the time
/// in the mark of a quorum's node back. Places far from the clock stay, because a request has given them. KEYS: as in
/// [`LOOK`], and the mark on a node of a quorum.
static AGE: LazyLock<Loadable> = LazyLock::new(|| {
    Loadable::new(
        "local ms = tonumber(ARGV[1])
    local function shorten(key)
        local till = redis.pcall('PEXPIRETIME', key)
        if type(till) == 'number' then
            if till >= 0 then redis.call('PEXPIREAT', key, till - ms) end
        else
            local left = redis.call('PTTL', key)
            if left >= 0 then redis.call('PEXPIRE', key, left - ms) end
        end
    end
    for n = 1, 2 do
        if redis.call('TYPE', KEYS[n]).ok == 'zset' then
            local all = redis.call('ZRANGE', KEYS[n], 0, -1, 'WITHSCORES')
            for i = 1, #all, 2 do redis.call('ZADD', KEYS[n], 'XX', all[i + 1] - ms, all[i]) end
        end
        local queue = redis.call('ZRANGE', KEYS[n + 2], 0, -1, 'WITHSCORES')
        for i = 1, #queue, 2 do
            local place = tonumber(queue[i + 1])
            if place % 4000000000000000 >= 1500000000000000 then
                redis.call('ZADD', KEYS[n + 2], 'XX', string.format('%.0f', place - ms * 1000), queue[i])
            end
        end
    end
    for n = 1, 5 do shorten(KEYS[n]) end
    local mark = KEYS[6] and redis.call('GET', KEYS[6])
    local run, since = string.match(mark or '', '^(%S+) (%d+)$')
    if run then redis.call('SET', KEYS[6], run .. string.format(' %016.0f', since - ms * 1000), 'KEEPTTL') end
    return 0"
            .to_owned(),
    )
});
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
            loaded: HashSet::new(),
            ahead: Duration::ZERO,
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

    /// Makes the server know the script.
    fn load(&mut self, script: &Loadable) {
        if !self.loaded.contains(&script.hash) {
            let mut load = redis::cmd("SCRIPT");
            let hash = load.arg("LOAD").arg(&script.text);
            let hash: String = hash.query(&mut self.connection).unwrap();
            assert_eq!(hash, script.hash);
            self.loaded.insert(hash);
        }
    }

    /// A call of [`LOOK`] or [`AGE`].
    fn call(&mut self, script: &Loadable, has_mark: bool) -> redis::Cmd {
        self.load(script);
        let mut call = redis::cmd("EVALSHA");
        call.arg(&script.hash).arg(if has_mark { 6 } else { 5 });
        let keys = [0, 1].map(key);
        for key in &keys {
            call.arg(key.in_redis());
        }
        for key in &keys {
            call.arg(key.queue_parts(self.layout).concat());
        }
        call.arg(value_key().in_redis());
        if has_mark {
            call.arg(key::data_mark("p:"));
        }
        call
    }

    /// Runs a history on Redis and on the keyspace, and returns the first difference as an error. If steps took long on
    /// a busy machine, the test does not know when keys expired. If it then finds a difference, it runs the history
    /// again.
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

    /// Runs the history once. Returns `None` if steps took too long to know whether there is a difference.
    fn compare_once(
        &mut self,
        subject: Subject,
        scripts: &Scripts,
        history: &[Operation],
    ) -> Option<Result<(), String>> {
        redis::cmd("FLUSHALL").exec(&mut self.connection).unwrap();
        self.ahead = Duration::ZERO;
        let mut twin = Twin::default();
        for (n, operation) in history.iter().enumerate() {
            match self.step(subject, scripts, &mut twin, operation)? {
                Ok(()) => {}
                Err(_) if twin.was_slow => return None,
                Err(how) => return Some(Err(format!("step {n}: {how}"))),
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
            Operation::Age(by) => {
                let mut age = self.call(&AGE, subject == Subject::Votes);
                age.arg(by.as_millis() as u64);
                age.exec(&mut self.connection).unwrap();
                self.ahead += *by;
                return Some(Ok(()));
            }
            Operation::Delete(key) => {
                let mut delete = redis::cmd("DEL");
                delete
                    .arg(key.in_redis())
                    .exec(&mut self.connection)
                    .unwrap();
                twin.keyspace.entries.remove(key);
                twin.values = [None, None];
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
                twin.keyspace.last_micros = COUNTED;
                return Some(Ok(()));
            }
            Operation::Mark(mark) => {
                let mark = mark.map(|(is_old, age)| Mark {
                    is_old,
                    since: self.time_of_age(age),
                });
                self.set_mark(mark);
                let mark = mark.map(|mark| mark_in_memory(mark, self.ahead));
                twin.keyspace.mark = mark;
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
            let value = (0..2).find(|n| self::key(*n) == *key);
            let value = value.and_then(|n| twin.values[n].as_deref());
            let stored = value.and_then(|value| LockValue::parse(value.as_bytes(), 0));
            if stored.is_some_and(|stored| stored.lease == *lease && stored.token.is_none()) {
                twin.keyspace.entries.remove(key);
            }
        }
        let is_plain = matches!(operation, Operation::Ask { is_plain: true, .. });
        let tried = command.filter(|command| is_plain && plain::can_grant(command));
        let tried = tried.map(|command| self.acquire_plain(&by, command));
        let found = self.find(subject, scripts, &by, command, tried)?;
        twin.was_slow |= found.after.since(found.before) >= GRAIN;
        twin.values = found.looked.each_ref().map(|looked| looked.value.clone());
        // A key may have expired before the command, between the command and the reads, or not at all. The keyspace has
        // to agree with Redis in one of these cases.
        let [first, last] = [found.before.before(GRAIN), found.after.after(GRAIN)];
        // A quarantine ends at a microsecond, so it may also end between the two exact times of the command.
        let [begun, ended] = found.command;
        // A slow command may come between the ends of two keys, for example those of a lock and of its value.
        let between = (1..).map(|n| first.after(n * GRAIN / 4));
        let between = between.take_while(|at| *at < last);
        let asked_at = [first, last, found.before, found.after, begun, ended];
        let asked_at = asked_at.into_iter().chain(between);
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
                self.load(&scripts.data_check);
                let mut log_in = redis::cmd("EVALSHA");
                log_in.arg(&scripts.data_check.hash);
                log_in.arg(1).arg(key::data_mark("p:"));
                let quarantine = QUARANTINE.as_millis() as u64;
                log_in.arg(quarantine).get_packed_command()
            }
        };
        let mut after = redis::pipe();
        after.add_command(self.call(&LOOK, false));
        if subject == Subject::Votes {
            after.cmd("ZSCORE").arg(self.fence_counter()).arg("t");
            after.cmd("GET").arg(key::data_mark("p:"));
        }
        after.cmd("PUBLISH").arg(END_OF_STEP).arg("");
        let time = redis::cmd("TIME").get_packed_command();
        let [multi, exec] = ["MULTI", "EXEC"].map(|name| redis::cmd(name).get_packed_command());
        let after = after.get_packed_pipeline();
        let transaction = [&multi, &time, &request, &after, &time, &exec].map(|part| &part[..]);
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
        let [begun, reply, Value::Array(looked), further @ .., ended] = &results[..] else {
            panic!("{results:?}");
        };
        let ahead = self.ahead;
        let command = [begun, ended]
            .map(|time| exact_time_of(redis::from_redis_value_ref(time).unwrap()).after(ahead));
        let time = |value| time_of(redis::from_redis_value_ref(value).unwrap()).after(ahead);
        let (before, after): (MonotonicTime, MonotonicTime) = (time(begun), time(ended));
        let before = tried.map_or(before, |(begun, _)| begun);
        if after.since(before) >= LONGEST_STEP {
            return None;
        }
        let mut reply = match script {
            None => Ok(data_check_reply(reply)),
            Some(_) if let Some((_, KeyOutcome::Granted(token))) = tried => Ok(Reply::Granted {
                token,
                is_token_in_value: false,
            }),
            Some(script) => match scripts::decode(script, 1, reply.clone(), "p:", None) {
                Decoded::Outcomes(mut outcomes) => outcomes.remove(0),
                Decoded::Unexpected(error) | Decoded::OutcomeUnknown(error) => Err(error),
                _ => unreachable!("one key, and the script's text is sent"),
            },
        };
        if let Ok(Reply::TooLate { micros }) = &mut reply {
            *micros += ahead.as_micros() as u64;
        }
        let left: i64 = redis::from_redis_value_ref(&looked[8]).unwrap();
        let ms = u64::try_from(left).ok();
        let value = (left != -2, ms.map(|ms| end_of(before, ms)));
        let text =
            |n: usize| -> Option<String> { redis::from_redis_value_ref(&further[n]).unwrap() };
        let node = (subject == Subject::Votes).then(|| {
            let counter = text(0).map(|counter| counter.parse().unwrap());
            let mark = text(1).map(|mark| {
                let (run_id, since) = mark.split_once(' ').unwrap();
                Mark {
                    is_old: run_id != self.run_id,
                    since: since.parse().unwrap(),
                }
            });
            (counter, mark)
        });
        let looked = [0, 1].map(|n| Looked::of(&looked[4 * n..][..4], before, ahead));
        Some(Found {
            reply,
            published,
            looked,
            value,
            node,
            held,
            ahead,
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
        let value = || {
            let key = command.key().map_or("", Key::in_redis);
            let value = redis::cmd("GET").arg(key).query(&mut self.connection);
            // A value that is not text cannot be a lock.
            value.unwrap_or(None::<String>)
        };
        let mut command = with_right_token(command, value);
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
        let loadable = &scripts.of_commands[command::place(script)];
        self.load(loadable);
        let call = ScriptRef::Hash(&loadable.hash);
        scripts::encode(&mut bytes, call, script, &names, [&command].into_iter());
        (bytes, command)
    }

    /// Tries an acquire with plain commands, as a connection does before it calls the script. Also returns the time of
    /// Redis before the attempt.
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
        (begun.after(self.ahead), acquires.outcomes[0])
    }

    /// Deletes the fence counter, unless it is later than the clock: then tokens would become smaller.
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

    /// The messages of a step.
    fn published(&mut self) -> Vec<String> {
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
                [_, _, channel, _] if channel == END_OF_STEP => return published,
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
    /// The values of both keys in Redis after the last step.
    values: [Option<String>; 2],
    /// Whether a step took longer than [`GRAIN`].
    was_slow: bool,
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
        let mut value = |key: Option<&Key>| self.keyspace.text(key?, &mut step);
        let mut command = command.map(|command| with_right_token(command, || value(command.key())));
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
            let start = clock_micros(MonotonicTime::at_tick(0).after(found.ahead));
            held.token = token_of(start + micros);
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
            // Redis may have no shares, although the reply is that of a keyspace with a share that is about to end.
            let (shares, own) = (&looked.shares, self.keyspace.shares(&key(n)));
            let is_near = |(one, other): (&(String, MonotonicTime), &(String, MonotonicTime))| {
                one.0 == other.0 && one.1.since(other.1) + other.1.since(one.1) <= slack
            };
            if shares.len() != own.len() || !shares.iter().zip(&own).all(is_near) {
                return Err(format!("Redis has the shares {shares:?}, memory {own:?}"));
            }
            let Some(end) = looked.end else { continue };
            let until = self.keyspace.expires_at(&key(n));
            if until.is_none_or(|until| until.since(end) + end.since(until) > slack) {
                return Err(format!("Redis keeps {n} until {end:?}, memory {until:?}"));
            }
            if !own.is_empty() {
                self.keyspace.end_shares_at(&key(n), shares);
                continue;
            }
            self.keyspace.expire_at(&key(n), end);
        }
        if let Some((counter, mark)) = found.node {
            let own = Some(self.keyspace.last_micros).filter(|own| *own > 0);
            let is_same = match (counter, own) {
                (Some(counter), Some(own)) => self.same_token(counter << 10, own << 10),
                _ => counter == own,
            };
            if !is_same {
                return Err(format!("Redis counts {counter:?}, memory {own:?}"));
            }
            let mark = mark.map(|mark| mark_in_memory(mark, found.ahead));
            let own = self.keyspace.mark;
            let is_near = |one: Mark, other: Mark| {
                let apart = Duration::from_micros(one.since.abs_diff(other.since));
                one.is_old == other.is_old && apart <= slack
            };
            if mark != own && !mark.zip(own).is_some_and(|(mark, own)| is_near(mark, own)) {
                return Err(format!("Redis has the mark {mark:?}, memory {own:?}"));
            }
            self.keyspace.mark = mark;
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
        // If leases share a key, its value contains no token. Only the messages contain the tokens of these grants.
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

    /// Compares the tokens of two fenced values, which a write has, or the grant of a candidate.
    fn same_written(&mut self, redis: u64, memory: u64) -> bool {
        redis == memory || self.tokens.get(&redis) == Some(&memory)
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
                let same_token = match (found.token, own.token) {
                    (Some(token), Some(own)) => self.same_written(token, own),
                    (token, own) => token == own,
                };
                same_lock && same_token && found.value == own.value
            }
            (Ok(Reply::Stale { token }), Ok(Reply::Stale { token: own })) => {
                self.same_written(*token, *own)
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

/// The mark with its time in the clock of the keyspace, which is `ahead` of that of Redis. Redis has made the mark with
/// its own clock.
fn mark_in_memory(mark: Mark, ahead: Duration) -> Mark {
    let since = clock_micros(MonotonicTime::at_tick(0).after(ahead)) + mark.since;
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
