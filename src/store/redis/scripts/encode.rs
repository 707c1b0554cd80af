//! How batches of commands are put on the wire.

use std::time::Duration;

use crate::store::command::{Command, QueueMode};
use crate::store::redis::scripts::{Kind, ScriptContext, ScriptRef};
use crate::store::value::micros_of;
use crate::util::id::LeaseId;

/// Appends one script call for `commands`, all of `kind`, to `buffer`.
pub(crate) fn encode<'a>(
    buffer: &mut Vec<u8>,
    call: ScriptRef<'_>,
    kind: Kind,
    names: &ScriptContext,
    commands: impl ExactSizeIterator<Item = &'a Command> + Clone,
) {
    let queued = commands.clone().filter(|command| kind.uses_queue(command));
    let keys = commands.len() + queued.clone().count() + usize::from(kind.counts());
    let fixed_args = usize::from(kind.names_holder()) + usize::from(kind.names_limit());
    let args = commands.len() * arguments_of(kind) + fixed_args;
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
    if kind.counts() {
        out.text(&names.fence_counter);
    }
    for command in commands.clone() {
        out.text(command.key().map_or("", |key| key.in_redis()));
    }
    for key in queued.filter_map(Command::key) {
        out.parts(key.queue_parts());
    }
    if kind.names_holder() {
        out.text(names.holder.as_str());
    }
    if kind.names_limit() {
        out.number(names.max_value as u64);
    }
    for command in commands {
        arguments(&mut out, names, command);
    }
}

/// How many there are for each key.
fn arguments_of(kind: Kind) -> usize {
    match kind {
        Kind::Inspect | Kind::Read => 0,
        Kind::Release => 1,
        Kind::Renew => 2,
        Kind::Acquire | Kind::Write => 3,
        Kind::Adopt => 4,
    }
}

fn arguments(out: &mut Encoder<'_>, names: &ScriptContext, command: &Command) {
    match command {
        Command::Acquire {
            lease,
            ttl,
            queue_mode,
            ..
        } => {
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
        Command::Release {
            lease,
            queued: Some(ttl),
            ..
        } => out.text(&format!("{lease},{},{}", ttl.as_millis(), names.holder)),
        Command::Release { lease, .. } => out.lease(*lease),
        Command::ForceUnlock { lease, .. } => {
            out.text(&format!("{lease}!{}", names.holder));
        }
        Command::Renew { lease, ttl, .. } => {
            out.lease(*lease);
            out.millis(*ttl);
        }
        Command::Adopt { lease, grant, .. } => {
            out.lease(grant.from);
            out.number(micros_of(grant.token));
            out.lease(*lease);
            if grant.renew {
                out.millis(grant.ttl);
            } else {
                out.text("");
            }
        }
        Command::Write {
            token, value, ttl, ..
        } => {
            // As text they sort like the numbers they are; doubles could not tell them apart.
            out.text(&format!("{token:020}"));
            let delete = if value.is_none() { "-" } else { "" };
            let ttl = ttl.map_or_else(String::new, |ttl| ttl.as_millis().to_string());
            out.text(&format!("{delete}{ttl}"));
            out.bytes(value.as_deref().unwrap_or_default());
        }
        Command::Inspect { .. } | Command::Read { .. } | Command::Flush { .. } => {}
    }
}

/// Appends a command that is no script call.
pub(crate) fn encode_words<'a>(
    buffer: &mut Vec<u8>,
    command: &str,
    words: impl ExactSizeIterator<Item = &'a str>,
) {
    let mut out = Encoder(buffer);
    out.array(1 + words.len());
    out.text(command);
    words.for_each(|word| out.text(word));
}

/// RESP2, the little of it that requests need.
struct Encoder<'a>(&'a mut Vec<u8>);

impl Encoder<'_> {
    fn array(&mut self, len: usize) {
        self.line(b'*', len as u64);
    }

    fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.line(b'$', bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self.0.extend_from_slice(b"\r\n");
    }

    fn parts(&mut self, parts: [&str; 3]) {
        self.line(b'$', parts.iter().map(|part| part.len() as u64).sum());
        for part in parts {
            self.0.extend_from_slice(part.as_bytes());
        }
        self.0.extend_from_slice(b"\r\n");
    }

    fn lease(&mut self, lease: LeaseId) {
        self.text(lease.encode(&mut [0; LeaseId::DIGITS]));
    }

    fn millis(&mut self, duration: Duration) {
        self.number(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX));
    }

    fn number(&mut self, number: u64) {
        let (digits, start) = decimal(number);
        self.bytes(&digits[start..]);
    }

    /// There are a dozen of them for each lock, nearly all with one or two digits.
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

/// The decimal digits of `number`, from the given index on. Several are written for each request:
/// the standard formatting takes ten times as long.
pub(super) fn decimal(mut number: u64) -> ([u8; 20], usize) {
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
