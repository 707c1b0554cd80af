//! Calls by plain commands: which requests plain commands can carry out, and how the client handles the replies.
//! `scripts/plain.rs` encodes the commands.

use std::time::Duration;

use redis::Value;

use crate::command::{Reply, acquire, release};
use crate::config::key::Key;
use crate::report::error::Error;
use crate::util::clock::MonotonicTime;
use crate::wire::connect::errors;
use crate::wire::net::refusal;
use crate::wire::pipeline::connection::{
    Call, InFlightBatch, MAX_KEYS, PipelinedConnection, replicas_of,
};
use crate::wire::pipeline::request::{Next, PendingRequest};
use crate::wire::scripts::ScriptContext;
use crate::wire::scripts::plain;
use crate::wire::scripts::plain::{CompareAndDelete, Deletes, KeyOutcome};

/// In a batch with at most this many releases, each one is a command of its own. Eight such commands take Redis about
/// as long as one script call with one key: 0.45 µs each, and 3.85 µs (Redis 8.6, Xeon 2.8 GHz).
const MOST_DELETES: usize = 8;

/// The script acquires and releases a key of [`ContendedKeys`] for this time. It is longer than the pause between two
/// requests of a waiter (1 to 2 s with hundreds of waiters), so a contended key keeps its entry.
const CONTENDED_FOR: Duration = Duration::from_secs(10);

/// The keys that plain commands could not set or delete lately. Most of these keys were taken or had waiters. Different
/// keys may share an entry, so the script also acquires some keys that are free.
#[derive(Default)]
pub struct ContendedKeys {
    /// When each entry ends. Empty until a key was taken.
    until: Vec<MonotonicTime>,
}

impl ContendedKeys {
    /// A prime number, because the hashes of a pipeline's keys all have the same remainder for the number of pipelines.
    const ENTRIES: usize = 251;

    pub fn record(&mut self, key: &Key, now: MonotonicTime) {
        self.until.resize(Self::ENTRIES, MonotonicTime::at_tick(0));
        self.until[key.shard(Self::ENTRIES)] = now.after(CONTENDED_FOR);
    }

    pub fn has(&self, key: &Key, now: MonotonicTime) -> bool {
        let until = self.until.get(key.shard(Self::ENTRIES));
        until.is_some_and(|until| now < *until)
    }
}

impl PipelinedConnection {
    /// Enqueues the acquires that plain commands can carry out, and leaves the others in `requests`. Returns whether a
    /// trial has to follow, so that later acquires can use plain commands.
    pub fn enqueue_plain(
        &mut self,
        context: &ScriptContext,
        requests: &mut Vec<PendingRequest>,
    ) -> bool {
        let now = MonotonicTime::now();
        if !context.has_plain_commands() || !context.plain_acquires.allow(now) {
            return false;
        }
        let contended = &self.contended;
        let can_grant = |request: &PendingRequest| {
            let key = request.command.key();
            plain::can_grant(&request.command)
                && !request.route.is_asking
                && key.is_some_and(|key| !contended.has(key, now))
        };
        let Some(clock) = self.clock.at(now) else {
            // The script carries out the first acquire of a connection, which shows that the user may call scripts:
            // without this right, the user could not release what plain commands acquire. A client that rarely acquires
            // a lock needs no trial: its estimate of the time would be too old for the next acquire.
            let is_busy = |last| now.since(last) <= plain::LONGEST_ESTIMATE;
            return self.last_script.is_some_and(is_busy) && requests.iter().any(can_grant);
        };
        let plain = if requests.iter().all(can_grant) {
            std::mem::take(requests)
        } else {
            requests
                .extract_if(.., |request| can_grant(request))
                .collect()
        };
        let asks_time = self.clock.is_old(now);
        let call = Call::Plain { clock, asks_time };
        self.enqueue_all(context, call, MAX_KEYS, plain);
        false
    }

    /// Enqueues releases. Locks without waiters are released by a command, if the server has one, and the others by the
    /// script.
    pub fn enqueue_releases(&mut self, context: &ScriptContext, mut requests: Vec<PendingRequest>) {
        let now = MonotonicTime::now();
        let contended = &self.contended;
        // If a lock has waiters, the command fails, and the script has to follow. So the command is used only if a
        // caller reads its reply at once. Otherwise the waiters would wait for the next reader, or for the ttl if the
        // process ends before.
        let can_delete = |request: &PendingRequest| {
            let key = request.command.key();
            plain::can_delete(&request.command)
                && request.completion.is_some()
                && !request.route.is_asking
                && key.is_some_and(|key| !contended.has(key, now))
        };
        let deletes = match context.has_plain_commands() && context.plain_releases.allow(now) {
            true => self.deletes,
            false => Deletes::Neither,
        };
        let mut is_tried = false;
        match deletes {
            // The usual case needs no new vectors.
            Deletes::Has(command) if requests.len() == 1 && can_delete(&requests[0]) => {
                return self.enqueue(context, Call::Delete(command), requests);
            }
            Deletes::Has(command) if requests.len() <= MOST_DELETES => {
                let deletable: Vec<PendingRequest> =
                    requests.extract_if(.., |it| can_delete(it)).collect();
                for request in deletable {
                    self.enqueue(context, Call::Delete(command), vec![request]);
                }
            }
            Deletes::Untried => is_tried = requests.iter().any(can_delete),
            _ => {}
        }
        let call = Call::script(context, &release::SCRIPT);
        self.enqueue_all(context, call, MAX_KEYS, requests);
        if is_tried {
            self.deletes = Deletes::Trying;
            for command in CompareAndDelete::ALL {
                self.enqueue(context, Call::DeleteTrial(command), Vec::new());
            }
        }
    }

    /// Handles the reply to acquires by plain commands: delivers the grants, and enqueues script calls for the other
    /// keys.
    pub fn finish_plain(
        &mut self,
        context: &ScriptContext,
        reply: &Value,
        refusal: Option<Value>,
        asks_time: bool,
        deliver: &mut impl FnMut(Next),
    ) -> Result<(), Error> {
        let Some(batch) = self.in_flight.front() else {
            return Ok(());
        };
        let commands = batch.requests.iter().map(|request| &request.command);
        let is_queued = batch.begins_with_error == Some(false);
        let decoded = plain::decode_acquires(commands, asks_time, is_queued, reply);
        let decoded = decoded.map_err(|error| {
            self.connection.discard_and_suspect_all();
            let error = error.at(&self.connection.address);
            context.refuse_plain_acquires(error.clone());
            error
        })?;
        let now = MonotonicTime::now();
        if let Some(micros) = decoded.clock {
            self.clock.record(micros, now);
        }
        let refusal = refusal.as_ref().unwrap_or(reply);
        if plain::is_lasting(refusal) {
            context.refuse_plain_acquires(self.plain_refused(context, refusal));
        }
        let batch = self.in_flight.pop_front();
        let mut requests = batch.map(|batch| batch.requests).unwrap_or_default();
        let mut left = self.empty_batch();
        for (mut request, outcome) in requests.drain(..).zip(decoded.outcomes) {
            match outcome {
                KeyOutcome::Granted(token) => {
                    let is_token_in_value = false;
                    let granted = Reply::Granted {
                        token,
                        is_token_in_value,
                    };
                    self.finish(request, Ok(granted), deliver);
                }
                KeyOutcome::NotSet => {
                    if let Some(key) = request.command.key() {
                        self.contended.record(key, now);
                    }
                    if request.is_wanted() {
                        left.push(request);
                    }
                }
                KeyOutcome::MayBeSet => {
                    request.may_be_set = true;
                    left.push(request);
                }
            }
        }
        self.keep(requests);
        if left.is_empty() {
            self.keep(left);
            return Ok(());
        }
        let replicas = replicas_of(&left);
        let call = Call::script(context, &acquire::SCRIPT);
        self.enqueue_all(context, call, MAX_KEYS, left);
        self.enqueue_wait(context, replicas);
        Ok(())
    }

    /// Handles the reply to a release by a command. If the lock was not deleted, enqueues a script call.
    pub fn finish_delete(
        &mut self,
        context: &ScriptContext,
        reply: &Value,
        deliver: &mut impl FnMut(Next),
    ) {
        if let Value::Int(1) = reply {
            let batch = self.in_flight.pop_front().into_iter();
            for request in batch.flat_map(|batch| batch.requests) {
                self.finish(request, Ok(Reply::Done), deliver);
            }
            return;
        }
        if plain::is_denied(reply) {
            self.deletes = Deletes::Untried;
            context.plain_releases.refuse(MonotonicTime::now());
        } else if plain::is_lasting(reply) {
            self.deletes = Deletes::Neither;
        }
        let released = self.in_flight.front().into_iter();
        let now = MonotonicTime::now();
        for key in released.flat_map(InFlightBatch::released_keys) {
            // Usually, the command failed because waiters are queued. For a while, the script releases this key at
            // once.
            self.contended.record(&key, now);
            self.released_late.push(key);
        }
        let call = Call::script(context, &release::SCRIPT);
        self.repeat(context, call, MAX_KEYS);
    }

    /// Handles the reply to the trial of a command that deletes.
    pub fn finish_delete_trial(
        &mut self,
        context: &ScriptContext,
        command: CompareAndDelete,
        reply: &Value,
    ) {
        self.in_flight.pop_front();
        self.deletes.record_trial(command, reply);
        context.plain_releases.record_reply();
        if plain::is_denied(reply) {
            context.plain_releases.refuse(MonotonicTime::now());
        }
    }

    /// Handles the reply to a trial.
    pub fn finish_trial(&mut self, context: &ScriptContext, reply: Value, refusal: Option<Value>) {
        self.in_flight.pop_front();
        context.plain_acquires.record_reply();
        if let Some(micros) = plain::decode_trial(&reply) {
            self.clock.record(micros, MonotonicTime::now());
            return;
        }
        let is_aborted = matches!(&reply, Value::ServerError(error) if error.code() == "EXECABORT");
        let is_open = refusal.is_none() && !is_aborted;
        let reason = refusal.unwrap_or(reply);
        if is_open || plain::is_lasting(&reason) {
            context.refuse_plain_acquires(self.plain_refused(context, &reason));
        }
        if is_open {
            // The server has accepted `MULTI` and refused `EXEC`, so it may queue all later commands. Or a proxy has
            // sent a reply of its own.
            self.connection.discard();
        }
    }

    fn plain_refused(&self, context: &ScriptContext, reply: &Value) -> Error {
        refusal::plain_refused(reply, &self.connection.address, &context.prefix)
    }

    /// Records the trials that got no reply before the connection ended.
    pub fn record_lost_trials(&self, context: &ScriptContext) {
        let now = MonotonicTime::now();
        let mut calls = self.in_flight.iter().map(|batch| batch.call);
        if calls.clone().any(|call| matches!(call, Call::Trial))
            && let Some(lost) = context.plain_acquires.record_lost_trial(now)
        {
            let address = &self.connection.address;
            context.refuse_plain_acquires(errors::lost_trials(address, lost));
        }
        if calls.any(|call| matches!(call, Call::DeleteTrial(_))) {
            context.plain_releases.record_lost_trial(now);
        }
    }
}
