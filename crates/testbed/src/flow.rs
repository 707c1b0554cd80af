//! One direction of one proxied connection. Passes all bytes on unchanged, possibly later. Never blocks.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

/// The most bytes held back per direction; beyond that, the proxy does not read from the sender.
const HOLD_LIMIT: usize = 64 << 20;
/// The most bytes that wait for a slow receiver, per direction, if no fault holds bytes back.
const FLOW_LIMIT: usize = 1 << 20;
/// The most reads in a row from one connection, before other connections have their turn.
const TURN_LIMIT: usize = 16;

struct Chunk {
    arrived: Instant,
    bytes: Vec<u8>,
    /// The number of `bytes` that are delivered already.
    sent: usize,
}

#[derive(Default)]
pub(crate) struct Flow {
    chunks: VecDeque<Chunk>,
    queued: usize,
    /// The number of bytes that have come so far.
    arrived: usize,
    /// The sender will send no more.
    ended: bool,
    /// The receiver accepts no more bytes, so the queued bytes are lost.
    refused: bool,
    /// The receiver was notified that the direction has ended.
    closed: bool,
    /// The receiver's buffer was full at the last try.
    blocked: bool,
}

impl Flow {
    pub(crate) fn arrived(&self) -> usize {
        self.arrived
    }

    pub(crate) fn queued(&self) -> usize {
        self.queued
    }

    /// Whether this direction will deliver no more bytes.
    pub(crate) fn is_over(&self) -> bool {
        self.closed || (self.ended && self.refused)
    }

    pub(crate) fn is_blocked(&self) -> bool {
        self.blocked
    }

    pub(crate) fn wants_bytes(&self, held: bool) -> bool {
        let limit = if held { HOLD_LIMIT } else { FLOW_LIMIT };
        !self.ended && self.queued < limit
    }

    /// When the next bytes may go out. `None` if there are no bytes, or if the delay has no end.
    pub(crate) fn due(&self, delay: Duration) -> Option<Instant> {
        self.chunks
            .front()
            .and_then(|chunk| chunk.arrived.checked_add(delay))
    }

    /// Reads the bytes that have arrived. Returns true if the sender broke the connection instead of ending its
    /// direction.
    pub(crate) fn fill(&mut self, mut from: &TcpStream, held: bool, buffer: &mut [u8]) -> bool {
        for _ in 0..TURN_LIMIT {
            if !self.wants_bytes(held) {
                break;
            }
            match from.read(buffer) {
                Ok(0) => self.ended = true,
                Ok(_) if self.refused => {}
                Ok(count) => {
                    let bytes = buffer[..count].to_vec();
                    self.queued += count;
                    self.arrived += count;
                    self.chunks.push_back(Chunk {
                        arrived: Instant::now(),
                        bytes,
                        sent: 0,
                    });
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => {
                    self.ended = true;
                    return true;
                }
            }
        }
        false
    }

    /// Writes the bytes that are due, `budget` at most. If no more bytes will come, then ends the direction. Returns
    /// the number of written bytes.
    pub(crate) fn drain(&mut self, to: &TcpStream, delay: Duration, budget: usize) -> usize {
        let now = Instant::now();
        let mut written = 0;
        self.blocked = false;
        while written < budget && self.due(delay).is_some_and(|due| due <= now) {
            match self.write_front(to, budget - written) {
                Ok(count) => written += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.blocked = true;
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => self.refuse(),
            }
        }
        if self.ended && self.queued == 0 && !self.closed {
            self.closed = true;
            // Fails if the receiver has gone.
            let _ = to.shutdown(Shutdown::Write);
        }
        written
    }

    fn write_front(&mut self, mut to: &TcpStream, most: usize) -> io::Result<usize> {
        let Some(chunk) = self.chunks.front_mut() else {
            return Ok(0);
        };
        let rest = &chunk.bytes[chunk.sent..];
        let count = to.write(&rest[..rest.len().min(most)])?;
        chunk.sent += count;
        self.queued -= count;
        if chunk.sent == chunk.bytes.len() {
            self.chunks.pop_front();
        }
        Ok(count)
    }

    /// Records that the receiver has gone, so that nothing can be delivered any more.
    pub(crate) fn refuse(&mut self) {
        self.refused = true;
        self.chunks.clear();
        self.queued = 0;
    }
}
