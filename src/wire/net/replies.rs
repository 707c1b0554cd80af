//! Parses replies of Redis (RESP2 and RESP3) from bytes that come in any pieces. Does no I/O.
//!
//! A server may be hostile. So the parser allocates nothing for an announced length: it keeps bytes as they come, until
//! the reply is whole. It returns an error as soon as the reply must exceed its limit.
//!
//! Other users may write long strings. So a string that is too long does not end the connection: the parser drops its
//! bytes, and puts an error in its place in the reply.
//!
//! The parser of redis-rs reads the types that scripts do not return.

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::fmt;
use std::io::{self, Read};
use std::mem::size_of;

use redis::{PushKind, RedisError, RedisResult, Value};

/// The usual size of a connection's buffer, in bytes. The buffer grows for a single reply that needs it.
const BUFFER: usize = 8 * 1024;
/// A buffer of more bytes than this is freed after its reply.
const LONGEST_BUFFER: usize = 64 * 1024;
/// Replies may be nested this deep, as in redis-rs.
const MAX_DEPTH: usize = 100;

/// The code of the error that takes the place of a string that is too long.
pub const TOO_LARGE: &str = "TOOLARGE";

/// The largest size of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    /// This many bytes, independent of the settings.
    Fixed(usize),
    /// The limit for a reply that holds values of the caller.
    Set {
        bytes: usize,
        /// The user's setting, for messages.
        max_reply_bytes: usize,
    },
}

impl Limit {
    pub fn bytes(self) -> usize {
        let (Self::Fixed(bytes) | Self::Set { bytes, .. }) = self;
        bytes
    }

    /// The greatest length of one string. The limit of a whole reply may cover several values.
    fn longest_string(self) -> usize {
        match self {
            Self::Fixed(bytes) => bytes,
            Self::Set {
                max_reply_bytes, ..
            } => max_reply_bytes,
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed(bytes) => write!(f, "{bytes} bytes"),
            Self::Set {
                max_reply_bytes, ..
            } => write!(f, "{max_reply_bytes} bytes (`max_reply_bytes`)"),
        }
    }
}

/// The bytes that were read from a connection, and the parser's state.
pub struct Replies {
    /// The bytes `start..end` were read from the connection, but not yet returned as a reply.
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    /// The state of the reply at `start`.
    frame: Frame,
    /// How many of the next bytes have to be dropped: the rest of a long string.
    to_drop: usize,
    /// The size of the last reply, as its limit counts it.
    last_size: usize,
}

impl Replies {
    pub fn new() -> Self {
        Self {
            buffer: vec![0; BUFFER],
            start: 0,
            end: 0,
            frame: Frame::default(),
            to_drop: 0,
            last_size: 0,
        }
    }

    /// Returns the next reply, if it is whole. Puts an error ([`TOO_LARGE`]) in the place of a string that is too long.
    /// Returns an error if the bytes are no reply, or if the reply is larger than `limit`. The size of a reply is its
    /// bytes plus the size of a [`Value`] for each element.
    pub fn next(&mut self, limit: Limit) -> RedisResult<Option<Value>> {
        let len = loop {
            if self.to_drop > 0 {
                return Ok(None);
            }
            let bytes = &self.buffer[self.start..self.end];
            match self.frame.advance(bytes, limit)? {
                Progress::Ended(len) => break len,
                Progress::Incomplete => return Ok(None),
                Progress::LongString { from, rest } => self.drop_string(from, rest, limit),
            }
        };
        let bytes = &self.buffer[self.start..self.end];
        let value = build(&bytes[..len], &mut 0)?;
        self.last_size = self.frame.size();
        self.frame.restart();
        self.start += len;
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if self.buffer.len() > LONGEST_BUFFER {
                self.buffer = vec![0; BUFFER];
            }
        }
        Ok(Some(value))
    }

    /// Replaces the string whose header begins at `from` by an error reply, and drops the `rest` bytes behind the
    /// header.
    fn drop_string(&mut self, from: usize, rest: usize, limit: Limit) {
        let (from, body) = (self.start + from, self.start + self.frame.at);
        let there = rest.min(self.end - body);
        let string = rest - 2;
        let error = format!("-{TOO_LARGE} a string of {string} bytes: longest reply {limit}\r\n");
        let (tail, to) = (body + there..self.end, from + error.len());
        self.end = to + tail.len();
        if self.end > self.buffer.len() {
            self.buffer.reserve_exact(self.end - self.buffer.len());
            self.buffer.resize(self.end, 0);
        }
        self.buffer.copy_within(tail, to);
        self.buffer[from..to].copy_from_slice(error.as_bytes());
        self.to_drop = rest - there;
        if let Limit::Fixed(_) = limit {
            self.frame.substituted += error.len();
        }
        self.frame.at = from - self.start;
        self.frame.searched = 0;
    }

    /// The size of the last reply that [`next`](Self::next) returned, as its limit counts it.
    pub fn last_size(&self) -> usize {
        self.last_size
    }

    /// The bytes that were read behind the last whole reply.
    pub fn unparsed(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Whether a part of the next reply was read.
    pub fn has_partial_reply(&self) -> bool {
        self.start < self.end
    }

    /// Reads once from `source`. Called when [`next`](Self::next) has found no whole reply.
    pub fn fill(&mut self, limit: Limit, mut source: impl Read) -> io::Result<()> {
        let len = self.buffer.len();
        if self.start > 0 && len - self.end < len / 4 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.end == len {
            // The buffer doubles, up to the limit of the reply.
            let longer = (2 * len).min(limit.bytes()).max(len + 1);
            self.buffer.reserve_exact(longer - len);
            self.buffer.resize(longer, 0);
        }
        match source.read(&mut self.buffer[self.end..])? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            n => {
                let dropped = n.min(self.to_drop);
                self.to_drop -= dropped;
                let kept = self.end + dropped..self.end + n;
                if dropped > 0 {
                    self.buffer.copy_within(kept, self.end);
                }
                self.end += n - dropped;
                Ok(())
            }
        }
    }
}

/// The result of a search for the end of a reply.
enum Progress {
    /// The reply is whole, and has this length.
    Ended(usize),
    Incomplete,
    /// A string that is too long begins at `from`, with `rest` bytes behind its header.
    LongString {
        from: usize,
        rest: usize,
    },
}

/// Finds the end of a reply. Each search continues where the last one stopped, so each byte is searched once.
#[derive(Default)]
struct Frame {
    /// The number of bytes that are parsed.
    at: usize,
    /// The end of the current line is at this byte or later.
    searched: usize,
    /// The length of the string that comes next, with its line end.
    string: Option<usize>,
    /// The number of missing elements in each array or map that has begun.
    missing: Vec<usize>,
    /// How many elements were announced.
    elements: usize,
    /// The bytes of errors that replaced long strings under [`Limit::Fixed`]. They do not count towards that limit,
    /// because other users may have written any number of long strings.
    substituted: usize,
    /// How many bytes were searched for the end of a line.
    #[cfg(test)]
    bytes_searched: usize,
}

impl Frame {
    fn restart(&mut self) {
        (self.at, self.searched) = (0, 0);
        (self.elements, self.substituted) = (0, 0);
        debug_assert!(self.string.is_none() && self.missing.is_empty());
    }

    /// `bytes` begins with a reply: searches for its end.
    fn advance(&mut self, bytes: &[u8], limit: Limit) -> RedisResult<Progress> {
        loop {
            if let Some(rest) = self.string {
                let Some(string) = bytes.get(self.at..self.at + rest) else {
                    return Ok(Progress::Incomplete);
                };
                if !string.ends_with(b"\r\n") {
                    return Err(garbage());
                }
                self.at += rest;
                self.string = None;
                if self.ends_an_element() {
                    return Ok(Progress::Ended(self.at));
                }
                continue;
            }
            let from = self.at;
            let Some(sign) = bytes.get(from) else {
                return Ok(Progress::Incomplete);
            };
            // The first byte is checked before the line is complete: a server that is not Redis may never end the line.
            if !b"+-:$*_>%~|,#!=(".contains(sign) || self.missing.len() >= MAX_DEPTH {
                return Err(garbage());
            }
            let unseen = self.searched.max(from + 1);
            #[cfg(test)]
            {
                self.bytes_searched += bytes.len().saturating_sub(unseen);
            }
            let Some(line_end) = line_end(bytes, unseen) else {
                self.searched = unseen.max(bytes.len().saturating_sub(1));
                return if bytes.len() < limit.bytes() {
                    Ok(Progress::Incomplete)
                } else {
                    Err(too_large(limit))
                };
            };
            let line = &bytes[from + 1..line_end];
            self.at = line_end + 2;
            let ends = match sign {
                b'$' => self.expect_string(number(line)?),
                b'!' | b'=' => match number(line)? {
                    ..0 => return Err(garbage()),
                    len => self.expect_string(len),
                },
                b'*' | b'~' | b'>' => self.expect_elements(number(line)?, 1, 0),
                b'%' | b'|' => match number(line)? {
                    ..0 => return Err(garbage()),
                    pairs => self.expect_elements(pairs, 2, usize::from(*sign == b'|')),
                },
                _ => true,
            };
            let room = limit.bytes().checked_sub(self.size());
            let room = room.ok_or_else(|| too_large(limit))?;
            let room = room.min(limit.longest_string().saturating_add(2));
            if let Some(rest) = self.string.filter(|rest| *rest > room) {
                if *sign != b'$' {
                    return Err(too_large(limit));
                }
                self.string = None;
                return Ok(Progress::LongString { from, rest });
            }
            if ends && self.ends_an_element() {
                return Ok(Progress::Ended(self.at));
            }
        }
    }

    /// The size as the limit counts it: the bytes that are parsed, plus the announced elements.
    fn size(&self) -> usize {
        let elements = self.elements.saturating_mul(size_of::<Value>());
        self.at
            .saturating_sub(self.substituted)
            .saturating_add(elements)
    }

    /// Begins a string of `len` bytes. Returns true if `len` is negative: the element is null, and complete.
    fn expect_string(&mut self, len: i64) -> bool {
        let len = usize::try_from(len).ok();
        self.string = len.map(|len| len.saturating_add(2));
        self.string.is_none()
    }

    /// Begins `count * each + more` elements. Returns true if their number is zero: the array or map is complete.
    fn expect_elements(&mut self, count: i64, each: usize, more: usize) -> bool {
        let count = usize::try_from(count).unwrap_or(0);
        let count = count.saturating_mul(each).saturating_add(more);
        self.elements = self.elements.saturating_add(count);
        if count > 0 {
            self.missing.push(count);
        }
        count == 0
    }

    /// Ends an element, and each array or map that ends with it. Returns true if the whole reply is complete.
    fn ends_an_element(&mut self) -> bool {
        while let Some(missing) = self.missing.last_mut() {
            *missing -= 1;
            if *missing > 0 {
                return false;
            }
            self.missing.pop();
        }
        true
    }
}

/// The value of the field `name` in a reply that is a list of names and values (RESP2) or a map (RESP3).
pub fn field<'a>(reply: &'a Value, name: &[u8]) -> Option<&'a [u8]> {
    let is_name = |it: &Value| match it {
        Value::BulkString(it) => it == name,
        Value::SimpleString(it) => it.as_bytes() == name,
        _ => false,
    };
    let value = match reply {
        Value::Array(fields) => {
            let mut pairs = fields.chunks_exact(2);
            &pairs.find(|pair| is_name(&pair[0]))?[1]
        }
        Value::Map(pairs) => &pairs.iter().find(|(key, _)| is_name(key))?.1,
        _ => return None,
    };
    match value {
        Value::BulkString(value) => Some(value),
        Value::SimpleString(value) => Some(value.as_bytes()),
        _ => None,
    }
}

/// Builds the element at `at` of a whole reply.
fn build(bytes: &[u8], at: &mut usize) -> RedisResult<Value> {
    let rest = bytes.get(*at..).ok_or_else(garbage)?;
    let end = line_end(rest, 1).ok_or_else(garbage)?;
    let push = message_kind(rest, end);
    let Some(sign @ (b'+' | b':' | b'$' | b'*' | b'>')) =
        rest.first().filter(|sign| **sign != b'>' || push.is_some())
    else {
        let Progress::Ended(len) = Frame::default().advance(rest, Limit::Fixed(usize::MAX))? else {
            return Err(garbage());
        };
        let element = &rest[..len];
        *at += element.len();
        // The errors of redis-rs quote the reply, which may contain secrets, so they are replaced.
        return redis::parse_redis_value(element).map_err(|_| garbage());
    };
    let line = &rest[1..end];
    *at += end + 2;
    match sign {
        b'+' if line == b"OK" => Ok(Value::Okay),
        // The reply to a queued command of a transaction. It is read as `OK`, which needs no copy. Within an array, the
        // same text is a caller's value.
        b'+' if line == b"QUEUED" && end + 2 == bytes.len() => Ok(Value::Okay),
        b'+' => Ok(Value::SimpleString(text(line)?.to_owned())),
        b':' => number(line).map(Value::Int),
        b'$' => {
            let Ok(len) = usize::try_from(number(line)?) else {
                return Ok(Value::Nil);
            };
            let string = bytes.get(*at..*at + len).ok_or_else(garbage)?;
            *at += len + 2;
            Ok(Value::BulkString(string.to_vec()))
        }
        _ => {
            let Ok(count) = usize::try_from(number(line)?) else {
                return Ok(Value::Nil);
            };
            let Some((kind, header)) = push else {
                return elements(bytes, at, count).map(Value::Array);
            };
            *at += header.len();
            let data = elements(bytes, at, count - 1)?;
            Ok(Value::Push { kind, data })
        }
    }
}

/// Builds the next `count` elements of a whole reply.
fn elements(bytes: &[u8], at: &mut usize, count: usize) -> RedisResult<Vec<Value>> {
    (0..count).map(|_| build(bytes, at)).collect()
}

/// The kind of the push message at the beginning of `bytes`, and the encoded kind. The first line has `end` bytes.
/// `None` for a kind that carries no notifications.
fn message_kind(bytes: &[u8], end: usize) -> Option<(PushKind, &'static [u8])> {
    const MESSAGE: &[u8] = b"$7\r\nmessage\r\n";
    const INVALIDATE: &[u8] = b"$10\r\ninvalidate\r\n";
    let count = bytes.get(..end)?.strip_prefix(b">")?;
    number(count).ok().filter(|count| *count > 0)?;
    let kind = bytes.get(end + 2..)?;
    if kind.starts_with(MESSAGE) {
        return Some((PushKind::Message, MESSAGE));
    }
    let invalidates = kind.starts_with(INVALIDATE);
    invalidates.then_some((PushKind::Invalidate, INVALIDATE))
}

/// The end of the first line that ends at `from` or later.
fn line_end(bytes: &[u8], from: usize) -> Option<usize> {
    let ends = bytes.get(from..)?.windows(2);
    let at = ends.into_iter().position(|end| end == b"\r\n")?;
    Some(from + at)
}

fn text(line: &[u8]) -> RedisResult<&str> {
    std::str::from_utf8(line).map_err(|_| garbage())
}

fn number(line: &[u8]) -> RedisResult<i64> {
    text(line)?.trim().parse().map_err(|_| garbage())
}

fn garbage() -> RedisError {
    (redis::ErrorKind::Parse, "not a reply of Redis").into()
}

fn too_large(limit: Limit) -> RedisError {
    let detail = format!("more than {limit}");
    match limit {
        Limit::Fixed(_) => (redis::ErrorKind::Parse, "the reply is too large", detail).into(),
        Limit::Set { .. } => redis::make_extension_error(TOO_LARGE.to_owned(), Some(detail)),
    }
}
