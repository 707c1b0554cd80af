//! Writes requests as RESP.

use std::time::Duration;

use crate::command::Held;
use crate::command::value;
use crate::command::value::micros_of;
use crate::util::id::{HolderId, LeaseId};

/// Appends requests to a buffer, as arrays and strings of RESP2.
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

    pub fn bytes(&mut self, bytes: &[u8]) {
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

    pub fn lease(&mut self, lease: LeaseId) {
        self.text(lease.encode(&mut [0; LeaseId::DIGITS]));
    }

    /// Writes the value that a held lock's key has while no waiter is queued.
    pub fn held_value(&mut self, holder: &HolderId, lease: LeaseId, held: Held) {
        let (digits, start) = decimal(micros_of(held.token));
        let micros = match held.is_token_in_value {
            true => std::str::from_utf8(&digits[start..]).unwrap_or_default(),
            false => value::NO_TOKEN,
        };
        let mut id = [0; LeaseId::DIGITS];
        self.parts(&value::parts(lease.encode(&mut id), micros, holder));
    }

    pub fn millis(&mut self, duration: Duration) {
        self.number(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX));
    }

    pub fn number(&mut self, number: u64) {
        let (digits, start) = decimal(number);
        self.bytes(&digits[start..]);
    }

    /// Writes a line with a length. Most lengths have one or two digits, for which this function has a fast path.
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

/// Formats `number` as decimal digits. The digits are at the end of the array, from the returned index on. (The
/// standard library takes ten times as long, and each request has several numbers.)
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
