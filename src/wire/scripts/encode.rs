//! Encodes script calls and other commands as RESP.

use std::time::Duration;

use crate::command::value;
use crate::command::value::micros_of;
use crate::command::{
    Acquire, Adopt, Command, ForceUnlock, Held, Hold, Propose, QueueMode, Release, Renew, Write,
};
use crate::util::id::LeaseId;
use crate::wire::scripts::{ScriptContext, ScriptKind, ScriptRef};

/// Appends one script call for `commands`, all of `kind`, to `buffer`. On a Cluster, their keys have the same slot.
pub fn encode<'a>(
    buffer: &mut Vec<u8>,
    call: ScriptRef<'_>,
    kind: ScriptKind,
    context: &ScriptContext,
    commands: impl ExactSizeIterator<Item = &'a Command> + Clone,
) {
    let queued = commands.clone().filter(|command| kind.uses_queue(command));
    let fixed_keys = usize::from(kind.uses_counter()) + usize::from(kind.uses_mark());
    let ends_with_mark = usize::from(context.ends_with_mark(kind));
    let keys = commands.len() + queued.clone().count() + fixed_keys + ends_with_mark;
    let fixed_args = usize::from(kind.sends_holder())
        + usize::from(kind.uses_mark())
        + usize::from(kind.sends_limit())
        + ends_with_mark;
    let publishes = || commands.clone().any(|command| kind.publishes(command));
    let shard = context.shard_channel_start().filter(|_| publishes());
    let args = commands.len() * arguments_per_key(kind) + fixed_args + usize::from(shard.is_some());
    let mut out = Encoder(buffer);
    out.array(3 + keys + args);
    match call {
        ScriptRef::Hash(hash) => {
            out.text("EVALSHA");
            out.text(hash);
        }
        ScriptRef::Text(text) => {
            out.text("EVAL");
            out.text(text);
        }
    }
    out.number(keys as u64);
    if kind.uses_counter() {
        let key = commands.clone().find_map(Command::key);
        let tag = key.map_or("", |key| key.fence_tag(context.layout));
        out.parts(&[&context.fence_counter, tag]);
    }
    if kind.uses_mark() {
        out.text(&context.data_mark);
    }
    for command in commands.clone() {
        out.text(command.key().map_or("", |key| key.in_redis()));
    }
    for key in queued.filter_map(Command::key) {
        out.parts(&key.queue_parts(context.layout));
    }
    if ends_with_mark > 0 {
        out.text(&context.data_mark);
    }
    if kind.sends_holder() {
        out.text(context.holder.as_str());
    }
    if kind.uses_mark() {
        out.millis(context.quarantine());
    }
    if kind.sends_limit() {
        out.number(context.max_value as u64);
    }
    for command in commands {
        arguments(&mut out, context, command);
    }
    if let Some(shard) = shard {
        out.text(&shard);
    }
    if ends_with_mark > 0 {
        out.millis(context.quarantine());
    }
}

/// The number of arguments for each key.
fn arguments_per_key(kind: ScriptKind) -> usize {
    match kind {
        ScriptKind::Inspect | ScriptKind::Read => 0,
        ScriptKind::Release | ScriptKind::Probe => 1,
        ScriptKind::Renew => 2,
        ScriptKind::Acquire | ScriptKind::Write => 3,
        ScriptKind::Adopt | ScriptKind::Propose | ScriptKind::Hold => 4,
    }
}

fn arguments(out: &mut Encoder<'_>, context: &ScriptContext, command: &Command) {
    match command {
        Command::Acquire(Acquire {
            lease,
            ttl,
            queue_mode,
            ..
        }) => {
            out.lease(*lease);
            out.millis(*ttl);
            match queue_mode {
                QueueMode::None => out.text(""),
                QueueMode::Existing { notified: false } => out.text("-"),
                QueueMode::Existing { notified: true } => out.text("-+"),
                QueueMode::Polling => out.text("0"),
                QueueMode::Notified => out.text("+"),
                QueueMode::Rejoin { since, polls } => {
                    let mode = if *polls { '0' } else { '+' };
                    out.text(&format!("{mode}{since}"));
                }
            }
        }
        // The scripts compare times as text.
        Command::Propose(Propose {
            lease,
            ttl,
            micros,
            until,
            from,
            ..
        }) => {
            match from {
                Some(from) => out.text(&format!("{lease},{},{:016}", from.lease, from.micros)),
                None => out.lease(*lease),
            }
            out.millis(*ttl);
            out.text(&format!("{micros:016}"));
            out.text(&format!("{until:016}"));
        }
        Command::Hold(Hold {
            lease,
            ttl,
            micros,
            sets_missing,
            ..
        }) => {
            out.lease(*lease);
            out.millis(*ttl);
            out.text(&format!("{micros:016}"));
            let until = sets_missing.map(|until| format!("{until:016}"));
            out.text(&until.unwrap_or_default());
        }
        Command::Release(Release {
            lease,
            queued: Some(ttl),
            ..
        }) => out.text(&format!("{lease},{},{}", ttl.as_millis(), context.holder)),
        // The script compares the key's value with this argument first.
        Command::Release(Release {
            lease,
            held: Some(held),
            ..
        }) => out.held_value(context, *lease, *held),
        Command::Release(Release { lease, .. }) => out.lease(*lease),
        Command::ForceUnlock(ForceUnlock {
            lease, must_notify, ..
        }) => {
            let mark = if *must_notify { '?' } else { '!' };
            out.text(&format!("{lease}{mark}{}", context.holder));
        }
        Command::Renew(Renew { lease, ttl, .. }) => {
            out.lease(*lease);
            out.millis(*ttl);
        }
        Command::Adopt(Adopt { lease, grant, .. }) => {
            out.lease(grant.from);
            // The script compares times as text.
            out.text(&format!("{:016}", micros_of(grant.token)));
            out.lease(*lease);
            if grant.renew {
                out.millis(grant.ttl);
            } else {
                out.text("");
            }
        }
        Command::Write(Write {
            token, value, ttl, ..
        }) => {
            // The script compares tokens as text. With leading zeros, text sorts in the order of the numbers. A Lua
            // number could not hold all digits of a token.
            out.text(&format!("{token:020}"));
            let delete = if value.is_none() { "-" } else { "" };
            let ttl = ttl.map_or_else(String::new, |ttl| ttl.as_millis().to_string());
            out.text(&format!("{delete}{ttl}"));
            out.bytes(value.as_deref().unwrap_or_default());
        }
        Command::Probe(_) => out.millis(context.quarantine()),
        Command::Inspect(_) | Command::Read(_) | Command::Flush => {}
    }
}

/// Appends a command that is no script call.
pub fn encode_words<'a>(
    buffer: &mut Vec<u8>,
    command: &str,
    words: impl ExactSizeIterator<Item = &'a str>,
) {
    let mut out = Encoder(buffer);
    out.array(1 + words.len());
    out.text(command);
    words.for_each(|word| out.text(word));
}

/// Writes the RESP2 types that requests use.
pub struct Encoder<'a>(pub &'a mut Vec<u8>);

impl Encoder<'_> {
    pub fn array(&mut self, len: usize) {
        self.line(b'*', len as u64);
    }

    /// Writes a command without arguments.
    pub fn word(&mut self, command: &str) {
        self.array(1);
        self.text(command);
    }

    pub fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.line(b'$', bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self.0.extend_from_slice(b"\r\n");
    }

    /// Writes one string that consists of `parts`.
    pub fn parts(&mut self, parts: &[&str]) {
        self.line(b'$', parts.iter().map(|part| part.len() as u64).sum());
        for part in parts {
            self.0.extend_from_slice(part.as_bytes());
        }
        self.0.extend_from_slice(b"\r\n");
    }

    fn lease(&mut self, lease: LeaseId) {
        self.text(lease.encode(&mut [0; LeaseId::DIGITS]));
    }

    /// Writes the whole value of a key that the lease holds, if no waiters are queued.
    pub fn held_value(&mut self, context: &ScriptContext, lease: LeaseId, held: Held) {
        let (digits, start) = decimal(micros_of(held.token));
        let micros = match held.is_token_in_value {
            true => std::str::from_utf8(&digits[start..]).unwrap_or_default(),
            false => value::NO_TOKEN,
        };
        let mut id = [0; LeaseId::DIGITS];
        self.parts(&value::parts(
            lease.encode(&mut id),
            micros,
            &context.holder,
        ));
    }

    pub fn millis(&mut self, duration: Duration) {
        self.number(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX));
    }

    pub fn number(&mut self, number: u64) {
        let (digits, start) = decimal(number);
        self.bytes(&digits[start..]);
    }

    /// Writes a length. A request has a dozen lengths, and most have one or two digits, which are written without a
    /// conversion.
    fn line(&mut self, sign: u8, number: u64) {
        let digit = |digit: u64| b'0' + digit as u8;
        match number {
            0..10 => self.0.extend([sign, digit(number)]),
            10..100 => self
                .0
                .extend([sign, digit(number / 10), digit(number % 10)]),
            _ => {
                let (digits, start) = decimal(number);
                self.0.push(sign);
                self.0.extend_from_slice(&digits[start..]);
            }
        }
        self.0.extend_from_slice(b"\r\n");
    }
}

/// The decimal digits of `number`, from the returned index on. The formatting of the standard library takes ten times
/// as long, and each request has several numbers.
pub fn decimal(mut number: u64) -> ([u8; 20], usize) {
    let mut digits = [0; 20];
    let mut start = digits.len();
    loop {
        start -= 1;
        digits[start] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return (digits, start);
        }
    }
}
