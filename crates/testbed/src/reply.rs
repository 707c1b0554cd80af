//! Reads a server's replies in RESP2.

use std::fmt;
use std::io::{self, BufRead};

/// One reply of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// No value.
    Nil,
    /// A number.
    Int(i64),
    /// A value; bytes that are not UTF-8 are shown as `U+FFFD`.
    Text(String),
    /// A simple reply such as `OK`.
    Status(String),
    /// The server refused the command; the text begins with its error code.
    Error(String),
    /// Several replies.
    Array(Vec<Reply>),
}

impl Reply {
    /// The text of a `Text` or a `Status`.
    pub fn as_text(&self) -> Option<&str> {
        match self {
            Reply::Text(text) | Reply::Status(text) => Some(text),
            _ => None,
        }
    }

    /// The number of an `Int`, or of a `Text` that is a number (the reply to `GET` on a counter).
    pub fn as_int(&self) -> Option<i64> {
        match self {
            Reply::Int(number) => Some(*number),
            Reply::Text(text) => text.parse().ok(),
            _ => None,
        }
    }
}

impl fmt::Display for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reply::Nil => f.write_str("(nil)"),
            Reply::Int(number) => write!(f, "{number}"),
            Reply::Text(text) | Reply::Status(text) => f.write_str(text),
            Reply::Error(text) => write!(f, "(error) {text}"),
            Reply::Array(replies) => {
                f.write_str("[")?;
                for (at, reply) in replies.iter().enumerate() {
                    f.write_str(if at == 0 { "" } else { ", " })?;
                    reply.fmt(f)?;
                }
                f.write_str("]")
            }
        }
    }
}

/// Reads exactly one reply.
pub(crate) fn read(from: &mut impl BufRead) -> io::Result<Reply> {
    let line = read_line(from)?;
    let mut characters = line.chars();
    let kind = characters.next();
    let rest = characters.as_str();
    match kind {
        Some('+') => Ok(Reply::Status(rest.to_owned())),
        Some('-') => Ok(Reply::Error(rest.to_owned())),
        Some(':') => Ok(Reply::Int(number(rest)?)),
        Some('$') => match usize::try_from(number(rest)?) {
            Err(_) => Ok(Reply::Nil),
            Ok(length) => read_text(from, length),
        },
        Some('*') => match usize::try_from(number(rest)?) {
            Err(_) => Ok(Reply::Nil),
            Ok(count) => Ok(Reply::Array(
                (0..count).map(|_| read(from)).collect::<Result<_, _>>()?,
            )),
        },
        _ => Err(not_resp(&line)),
    }
}

fn read_line(from: &mut impl BufRead) -> io::Result<String> {
    let mut line = Vec::new();
    from.read_until(b'\n', &mut line)?;
    if !line.ends_with(b"\r\n") {
        let reason = "the connection was closed before the reply";
        return Err(io::Error::new(io::ErrorKind::UnexpectedEof, reason));
    }
    line.truncate(line.len() - 2);
    Ok(String::from_utf8_lossy(&line).into_owned())
}

fn read_text(from: &mut impl BufRead, length: usize) -> io::Result<Reply> {
    let mut bytes = vec![0; length + 2];
    from.read_exact(&mut bytes)?;
    bytes.truncate(length);
    Ok(Reply::Text(String::from_utf8_lossy(&bytes).into_owned()))
}

fn number(text: &str) -> io::Result<i64> {
    text.parse().map_err(|_| not_resp(text))
}

fn not_resp(line: &str) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("{line:?} is not a reply of a Redis server"),
    )
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn parse(bytes: &[u8]) -> io::Result<Reply> {
        read(&mut io::Cursor::new(bytes))
    }

    #[test]
    fn every_kind_of_reply_is_read() {
        let bytes = b"*6\r\n+OK\r\n-ERR no\r\n:-7\r\n$4\r\na\r\nb\r\n$-1\r\n*2\r\n:1\r\n$0\r\n\r\n";
        let inner = Reply::Array(vec![Reply::Int(1), Reply::Text(String::new())]);
        let expected = Reply::Array(vec![
            Reply::Status("OK".into()),
            Reply::Error("ERR no".into()),
            Reply::Int(-7),
            Reply::Text("a\r\nb".into()),
            Reply::Nil,
            inner,
        ]);
        assert_eq!(parse(bytes).unwrap(), expected);
        assert_eq!(
            expected.to_string(),
            "[OK, (error) ERR no, -7, a\r\nb, (nil), [1, ]]"
        );
    }

    #[test]
    fn a_closed_connection_and_another_protocol_are_errors() {
        assert_eq!(parse(b"").unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(
            parse(b"+O").unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
        assert_eq!(
            parse(b"$5\r\nab").unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof
        );
        assert_eq!(
            parse(b"HTTP/1.1 400\r\n").unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
        assert_eq!(
            parse(b"\r\n").unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
        assert_eq!(
            parse(b":x\r\n").unwrap_err().kind(),
            io::ErrorKind::InvalidData
        );
    }

    #[test]
    fn numbers_are_read_from_texts_too() {
        assert_eq!(Reply::Int(4).as_int(), Some(4));
        assert_eq!(Reply::Text("4".into()).as_int(), Some(4));
        assert_eq!(Reply::Text("x".into()).as_int(), None);
        assert_eq!(Reply::Status("OK".into()).as_text(), Some("OK"));
        assert_eq!(Reply::Nil.as_text(), None);
    }
}
