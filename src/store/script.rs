//! The scripts: their text, and how batches of commands are put on the wire and answers read.

use std::sync::LazyLock;
use std::time::Duration;

use redis::Value;

use crate::error::{Error, ErrorKind};
use crate::id::{HolderId, LeaseId};
use crate::store::command::{Command, Reply};
use crate::store::connect;

static ACQUIRE: LazyLock<String> = LazyLock::new(|| bare(include_str!("../../lua/acquire.lua")));
static RELEASE: LazyLock<String> = LazyLock::new(|| bare(include_str!("../../lua/release.lua")));
static RENEW: LazyLock<String> = LazyLock::new(|| bare(include_str!("../../lua/renew.lua")));

/// A script without its comments and indentation: Redis hashes the text each time it comes.
fn bare(script: &str) -> String {
    let lines = script.lines().map(str::trim_start);
    let code = lines.filter(|line| !line.is_empty() && !line.starts_with("--"));
    code.collect::<Vec<_>>().join("\n")
}

/// A fencing token is the µs part that Redis makes, shifted by this to leave room for the number of
/// a hand-off within one grant.
const TOKEN_SHIFT: u32 = 10;

/// Which script a batch is for; a batch is of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Release,
    Acquire,
    Renew,
}

impl Kind {
    /// In the order in which a batch is written: a key let go and asked for in one batch is free
    /// when its acquire runs.
    pub(crate) const ALL: [Self; 3] = [Self::Release, Self::Acquire, Self::Renew];

    pub(crate) fn of(command: &Command) -> Option<Self> {
        match command {
            Command::Acquire { .. } => Some(Self::Acquire),
            Command::Release { .. } => Some(Self::Release),
            Command::Renew { .. } => Some(Self::Renew),
            Command::Flush { .. } => None,
        }
    }

    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Acquire => &ACQUIRE,
            Self::Release => &RELEASE,
            Self::Renew => &RENEW,
        }
    }
}

/// How a script is named in a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Call<'a> {
    Hash(&'a str),
    Text(&'a str),
}

/// What every request of a client has in common.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    pub(crate) holder: HolderId,
    pub(crate) fence_counter: String,
}

/// Appends one script call for `commands`, all of `kind`, to `buffer`.
pub(crate) fn encode<'a>(
    buffer: &mut Vec<u8>,
    call: Call<'_>,
    kind: Kind,
    names: &Names,
    commands: impl ExactSizeIterator<Item = &'a Command> + Clone,
) {
    let n = commands.len();
    let (keys, args) = match kind {
        Kind::Acquire => (n + 1, 2 * n + 1),
        Kind::Release => (n, n),
        Kind::Renew => (n, 2 * n),
    };
    let mut out = Encoder(buffer);
    out.array(3 + keys + args);
    match call {
        Call::Hash(hash) => {
            out.text("EVALSHA");
            out.text(hash);
        }
        Call::Text(text) => {
            out.text("EVAL");
            out.text(text);
        }
    }
    out.number(keys as u64);
    if kind == Kind::Acquire {
        out.text(&names.fence_counter);
    }
    for command in commands.clone() {
        out.text(parts(command).0);
    }
    if kind == Kind::Acquire {
        out.text(names.holder.as_str());
    }
    for command in commands {
        let (_, lease, ttl) = parts(command);
        out.text(lease.encode(&mut [0; LeaseId::DIGITS]));
        if let Some(ttl) = ttl {
            out.number(u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX));
        }
    }
}

fn parts(command: &Command) -> (&str, LeaseId, Option<Duration>) {
    match command {
        Command::Acquire { key, lease, ttl } | Command::Renew { key, lease, ttl } => {
            (key.in_redis(), *lease, Some(*ttl))
        }
        Command::Release { key, lease, .. } => (key.in_redis(), *lease, None),
        Command::Flush { .. } => unreachable!("a flush is not put on the wire"),
    }
}

/// RESP2, the little of it that requests need.
struct Encoder<'a>(&'a mut Vec<u8>);

impl Encoder<'_> {
    fn array(&mut self, len: usize) {
        self.line(b'*', len as u64);
    }

    fn text(&mut self, text: &str) {
        self.line(b'$', text.len() as u64);
        self.0.extend_from_slice(text.as_bytes());
        self.0.extend_from_slice(b"\r\n");
    }

    fn number(&mut self, number: u64) {
        let (digits, start) = decimal(number);
        self.line(b'$', (digits.len() - start) as u64);
        self.0.extend_from_slice(&digits[start..]);
        self.0.extend_from_slice(b"\r\n");
    }

    fn line(&mut self, sign: u8, number: u64) {
        let (digits, start) = decimal(number);
        self.0.push(sign);
        self.0.extend_from_slice(&digits[start..]);
        self.0.extend_from_slice(b"\r\n");
    }
}

/// The decimal digits of `number`, from the given index on. Several are written for each request:
/// the standard formatting takes ten times as long.
fn decimal(mut number: u64) -> ([u8; 20], usize) {
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

/// What came back for one script call: an outcome for each command, or the whole call again.
pub(crate) enum Decoded {
    Outcomes(Vec<Result<Reply, Error>>),
    /// The server refused the whole call; the connection is in order.
    Refused(Error),
    /// The server does not know the script (flushed, failed over): send its text.
    NoScript,
    /// Not an answer to what was asked: the connection cannot be trusted.
    Nonsense(Error),
}

/// Reads the answer to a script call for `n` commands of `kind`.
pub(crate) fn decode(kind: Kind, n: usize, value: Value) -> Decoded {
    match value {
        Value::Array(values) if values.len() == 2 * n => {
            let mut outcomes = Vec::with_capacity(n);
            let mut values = values.into_iter();
            while let (Some(code), Some(detail)) = (values.next(), values.next()) {
                match outcome(kind, &code, &detail) {
                    Some(outcome) => outcomes.push(outcome),
                    None => return nonsense(kind, &format_args!("{code:?}, {detail:?}")),
                }
            }
            Decoded::Outcomes(outcomes)
        }
        Value::ServerError(error) if error.code() == "NOSCRIPT" => Decoded::NoScript,
        Value::ServerError(error) => {
            Decoded::Refused(connect::refusal(error.code(), error.details()))
        }
        other => nonsense(kind, &format_args!("{other:?}")),
    }
}

fn nonsense(kind: Kind, what: &std::fmt::Arguments<'_>) -> Decoded {
    let mut what = what.to_string();
    what.truncate(what.floor_char_boundary(200));
    let message = format!("unexpected answer to {kind:?}: {what}");
    Decoded::Nonsense(Error::new(ErrorKind::Protocol, message))
}

fn outcome(kind: Kind, code: &Value, detail: &Value) -> Option<Result<Reply, Error>> {
    let Value::Int(code) = code else { return None };
    Some(match (code, kind, detail) {
        (1, Kind::Acquire, Value::BulkString(micros)) => {
            let micros: u64 = std::str::from_utf8(micros).ok()?.parse().ok()?;
            let token = micros.checked_mul(1 << TOKEN_SHIFT)?;
            Ok(Reply::Granted { token })
        }
        (1, Kind::Release | Kind::Renew, _) => Ok(Reply::Done),
        (0, Kind::Acquire, Value::Int(ms)) => Ok(Reply::Contended {
            expires_in: Duration::from_millis(u64::try_from(*ms).unwrap_or(0)),
        }),
        (0, Kind::Release | Kind::Renew, _) => Ok(Reply::Missing),
        (2, Kind::Release | Kind::Renew, Value::BulkString(value)) => Ok(Reply::Taken {
            by: HolderId::of_value(value),
        }),
        (3, Kind::Acquire, Value::BulkString(found)) => Err(Error::new(
            ErrorKind::Protocol,
            format!(
                "a value that is not a lock of this library stands under the key: {:?}",
                String::from_utf8_lossy(found)
            ),
        )),
        (4, _, Value::BulkString(error)) => {
            let error = String::from_utf8_lossy(error);
            let (code, text) = error.split_once(' ').unwrap_or((&error, ""));
            if code == "WRONGTYPE" && kind != Kind::Acquire {
                // Not even a string where the lock was: somebody wrote over it.
                return Some(Ok(Reply::Taken { by: None }));
            }
            Err(connect::refusal(code, Some(text)))
        }
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Moment;
    use crate::key::Key;

    fn names() -> Names {
        Names {
            holder: HolderId::of_this_process(),
            fence_counter: "p:~fence".to_owned(),
        }
    }

    #[test]
    fn a_call_is_what_redis_reads() {
        let key = Key::new("p:", "a", 10).unwrap();
        let lease = LeaseId::random();
        let until = Moment::now();
        let command = Command::Release { key, lease, until };
        let mut buffer = Vec::new();
        let call = Call::Text("return 1");
        encode(
            &mut buffer,
            call,
            Kind::Release,
            &names(),
            [&command].into_iter(),
        );
        let wanted = format!(
            "*5\r\n$4\r\nEVAL\r\n$8\r\nreturn 1\r\n$1\r\n1\r\n$3\r\np:a\r\n$32\r\n{lease:?}\r\n"
        );
        assert_eq!(String::from_utf8(buffer).unwrap(), wanted);
    }

    #[test]
    fn numbers_are_written_in_decimal() {
        for number in [0, 7, 10, 30_000, u64::MAX] {
            let (digits, start) = decimal(number);
            assert_eq!(&digits[start..], number.to_string().as_bytes());
        }
    }

    #[test]
    fn an_answer_of_the_wrong_shape_is_nonsense() {
        for value in [
            Value::Okay,
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![Value::Int(9), Value::Int(0)]),
            Value::Array(vec![Value::Int(1), Value::Int(0)]),
        ] {
            let decoded = decode(Kind::Acquire, 1, value);
            assert!(matches!(decoded, Decoded::Nonsense(_)));
        }
    }
}
