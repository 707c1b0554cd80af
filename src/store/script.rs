//! The scripts: their text, and how batches of commands are put on the wire and answers read.

use std::sync::LazyLock;
use std::time::Duration;

use redis::{ServerError, Value};

use crate::error::{Error, ErrorKind};
use crate::id::{HolderId, LeaseId};
use crate::store::command::{Command, Reply, Standing};
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
        Kind::Acquire => (n + 1, 3 * n + 1),
        Kind::Release => (n + 1, n),
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
    if kind != Kind::Renew {
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
        let millis = ttl.map(|ttl| u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX));
        if let Some(millis) = millis {
            out.number(millis);
        }
        if let (Command::Acquire { standing, .. }, Some(millis)) = (command, millis) {
            match standing {
                Standing::None => out.text(""),
                Standing::Kept => out.text("-"),
                Standing::Polling => out.number(0),
                Standing::Told => out.number(millis),
            }
        }
    }
}

fn parts(command: &Command) -> (&str, LeaseId, Option<Duration>) {
    match command {
        Command::Acquire {
            key, lease, ttl, ..
        }
        | Command::Renew { key, lease, ttl } => (key.in_redis(), *lease, Some(*ttl)),
        Command::Release { key, lease, .. } => (key.in_redis(), *lease, None),
        Command::Flush { .. } => unreachable!("a flush is not put on the wire"),
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

/// The fencing token of a grant, from the µs part that Redis made of it.
pub(crate) fn token(micros: &str) -> Option<u64> {
    micros.parse::<u64>().ok()?.checked_mul(1 << TOKEN_SHIFT)
}

/// Whether the value of a lock says that `lease` has it.
pub(crate) fn holds(value: &[u8], lease: LeaseId) -> bool {
    let id = value.strip_prefix(b"lh1 ");
    id.is_some_and(|id| id.starts_with(lease.encode(&mut [0; LeaseId::DIGITS]).as_bytes()))
}

/// Whether the value of a lock says that `lease` waits for it.
pub(crate) fn stands_in_line(value: &[u8], lease: LeaseId) -> bool {
    let mut digits = [0; LeaseId::DIGITS];
    let id = lease.encode(&mut digits).as_bytes();
    let mut words = value.split(|byte| *byte == b' ').skip(4);
    words.any(|word| word.starts_with(id))
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

/// What came back for one script call.
pub(crate) enum Decoded {
    /// An outcome for each command; `out_of_place` says that another connection may lead to a
    /// server that can do what this one cannot (a new primary).
    Outcomes {
        outcomes: Vec<Result<Reply, Error>>,
        out_of_place: bool,
    },
    /// An error that is not Redis' own (a proxy's, say): nobody knows what was done.
    Doubtful(Error),
    /// The call was refused for one of its keys: ask for each by itself.
    Apart,
    /// The server does not know the script (flushed, failed over): send its text.
    NoScript,
    /// Not an answer to what was asked: the connection cannot be trusted.
    Nonsense(Error),
}

/// Reads the answer to a script call for `n` commands of `kind`.
pub(crate) fn decode(kind: Kind, n: usize, value: Value) -> Decoded {
    if let Value::ServerError(error) = &value {
        let (code, detail) = own_words(error);
        match code {
            "NOSCRIPT" => return Decoded::NoScript,
            "CROSSSLOT" | "NOPERM" if n > 1 => return Decoded::Apart,
            _ if !code.bytes().all(|byte| byte.is_ascii_uppercase()) => {
                return Decoded::Doubtful(connect::refusal(code, Some(detail)));
            }
            _ => {}
        }
    }
    let results = match &value {
        Value::Array(values) if n > 1 && values.len() == n => values.as_slice(),
        Value::Array(_) => return nonsense(kind, &value),
        one => std::slice::from_ref(one),
    };
    let out_of_place = results.iter().any(is_out_of_place);
    let mut outcomes = Vec::with_capacity(n);
    for result in results {
        match outcome(kind, result) {
            Some(outcome) => outcomes.push(outcome),
            None => return nonsense(kind, &value),
        }
    }
    // One error for several keys: the call was refused as a whole.
    match (&value, outcomes.first()) {
        (Value::ServerError(_), Some(refused)) => outcomes = vec![refused.clone(); n],
        _ if outcomes.len() != n => return nonsense(kind, &value),
        _ => {}
    }
    Decoded::Outcomes {
        outcomes,
        out_of_place,
    }
}

fn is_out_of_place(result: &Value) -> bool {
    let Value::ServerError(error) = result else {
        return false;
    };
    let code = own_words(error).0;
    matches!(code, "CLUSTERDOWN" | "LOADING" | "MASTERDOWN" | "READONLY")
}

/// Code and detail of an error. Before Redis 7 a script's own are wrapped once more:
/// `@user_script: 18: -OOM command not allowed ..`.
fn own_words(error: &ServerError) -> (&str, &str) {
    let (code, detail) = (error.code(), error.details().unwrap_or(""));
    if !code.starts_with('@') {
        return (code, detail);
    }
    let inner = detail.split_once(": ").map_or(detail, |(_, inner)| inner);
    let inner = inner.strip_prefix('-').unwrap_or(inner);
    inner.split_once(' ').unwrap_or((inner, ""))
}

fn nonsense(kind: Kind, value: &Value) -> Decoded {
    let mut what = format!("{value:?}");
    what.truncate(what.floor_char_boundary(200));
    let message = format!("unexpected answer to {kind:?}: {what}");
    Decoded::Nonsense(Error::new(ErrorKind::Protocol, message))
}

/// What one result of a script means, as its header says.
fn outcome(kind: Kind, result: &Value) -> Option<Result<Reply, Error>> {
    Some(match (kind, result) {
        (Kind::Acquire, Value::BulkString(micros)) => {
            let token = token(std::str::from_utf8(micros).ok()?)?;
            Ok(Reply::Granted { token })
        }
        (Kind::Acquire, Value::Int(ms)) => {
            let in_line = *ms < 0;
            let ms = if in_line { -1 - ms } else { *ms };
            Ok(Reply::Contended {
                expires_in: Duration::from_millis(u64::try_from(ms).unwrap_or(0)),
                in_line,
            })
        }
        (Kind::Release | Kind::Renew, Value::Int(1)) => Ok(Reply::Done),
        (Kind::Release | Kind::Renew, Value::Int(0)) => Ok(Reply::Missing),
        (Kind::Release | Kind::Renew, Value::BulkString(value)) => Ok(Reply::Taken {
            by: HolderId::of_value(value),
        }),
        (_, Value::ServerError(error)) => match (kind, own_words(error)) {
            // Not even a string where the lock was: somebody wrote over it.
            (Kind::Release | Kind::Renew, ("WRONGTYPE", _)) => Ok(Reply::Taken { by: None }),
            (Kind::Acquire, ("FOREIGN", found)) => {
                let message = format!("no lock of this library stands under the key: {found:?}");
                Err(Error::new(ErrorKind::Protocol, message))
            }
            (_, (code, detail)) => Err(connect::refusal(code, Some(detail))),
        },
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
        let command = Command::Release {
            key,
            lease,
            until,
            held: None,
        };
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
            "*6\r\n$4\r\nEVAL\r\n$8\r\nreturn 1\r\n$1\r\n2\r\n$8\r\np:~fence\r\n$3\r\np:a\r\n\
             $32\r\n{lease:?}\r\n"
        );
        assert_eq!(String::from_utf8(buffer).unwrap(), wanted);
    }

    #[test]
    fn a_value_says_who_holds_and_who_stands_in_line() {
        let [holder, first, second, none] = [(); 4].map(|()| LeaseId::random());
        let line = format!(" {first:?},5000,host/2/b {second:?},0,host/3/c");
        let value = format!("lh1 {holder:?} 1795263780943818 host/1/a{line}");
        let value = value.as_bytes();
        assert!(holds(value, holder) && !holds(value, first) && !holds(b"lh1 short", holder));
        assert!([first, second].map(|id| stands_in_line(value, id)) == [true, true]);
        assert!([holder, none].map(|id| stands_in_line(value, id)) == [false, false]);
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
            Value::BulkString(b"not a number".to_vec()),
            Value::Nil,
        ] {
            let decoded = decode(Kind::Acquire, 1, value);
            assert!(matches!(decoded, Decoded::Nonsense(_)));
        }
        let short = Value::Array(vec![Value::Int(1)]);
        assert!(matches!(
            decode(Kind::Release, 2, short),
            Decoded::Nonsense(_)
        ));
        let one_for_two = decode(Kind::Release, 2, Value::Int(1));
        assert!(matches!(one_for_two, Decoded::Nonsense(_)));
    }

    fn answer(wire: &str) -> Value {
        redis::parse_redis_value(wire.as_bytes()).unwrap()
    }

    #[test]
    fn errors_of_a_script_are_read_in_the_words_of_every_version() {
        for wire in [
            "-OOM command not allowed\r\n",
            "-@user_script: 18: -OOM command not allowed\r\n",
        ] {
            let Decoded::Outcomes { outcomes, .. } = decode(Kind::Acquire, 1, answer(wire)) else {
                panic!("{wire}");
            };
            let error = outcomes[0].as_ref().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        }
    }

    #[test]
    fn one_demoted_primary_in_a_batch_is_enough_to_look_elsewhere() {
        let wire = "*2\r\n:0\r\n-READONLY You can't write against a read only replica.\r\n";
        let decoded = decode(Kind::Renew, 2, answer(wire));
        assert!(matches!(
            decoded,
            Decoded::Outcomes {
                out_of_place: true,
                ..
            }
        ));
    }

    #[test]
    fn an_error_that_is_not_of_redis_leaves_what_was_done_in_doubt() {
        let decoded = decode(Kind::Acquire, 1, answer("-upstream failure\r\n"));
        assert!(matches!(decoded, Decoded::Doubtful(_)));
    }

    #[test]
    fn a_batch_refused_for_one_of_its_keys_is_taken_apart() {
        let refused = || answer("-NOPERM No permissions to access a key\r\n");
        assert!(matches!(
            decode(Kind::Acquire, 2, refused()),
            Decoded::Apart
        ));
        assert!(matches!(
            decode(Kind::Acquire, 1, refused()),
            Decoded::Outcomes { .. }
        ));
    }
}
