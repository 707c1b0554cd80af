//! One connection and what is in flight on it: batches written, answers owed. Decides nothing about
//! who waits for whom and never retries on another connection; that is the lane's.

use std::collections::VecDeque;
use std::time::Duration;

use r2d2::PooledConnection;

use crate::clock::Moment;
use crate::error::{Error, ErrorKind};
use crate::store::command::{Command, Reply};
use crate::store::connect::Connector;
use crate::store::lane::Pending;
use crate::store::script::{self, Call, Decoded, Kind, Names};

/// Keys in one script call: bounds for how long it keeps Redis from everybody else.
const MAX_KEYS: usize = 256;

/// Commands that share one script call, and so one answer.
struct Exchange {
    kind: Kind,
    by_text: bool,
    pendings: Vec<Pending>,
}

pub(crate) struct Link {
    wire: PooledConnection<Connector>,
    in_flight: VecDeque<Exchange>,
    buffer: Vec<u8>,
    /// What was last written may not have arrived whole, so nothing may be written behind it.
    cut: bool,
}

impl Link {
    pub(crate) fn new(wire: PooledConnection<Connector>) -> Self {
        Self {
            wire,
            in_flight: VecDeque::new(),
            buffer: Vec::new(),
            cut: false,
        }
    }

    /// Script calls whose answers have not been read.
    pub(crate) fn owed(&self) -> usize {
        self.in_flight.len()
    }

    /// Puts a batch on the wire. Whatever happens, it is then in flight.
    pub(crate) fn write(&mut self, names: &Names, batch: Vec<Pending>) -> Result<(), Error> {
        let mut by_kind = Kind::ALL.map(|_| Vec::new());
        for pending in batch {
            if let Some(kind) = Kind::of(&pending.command) {
                by_kind[kind as usize].push(pending);
            }
        }
        self.buffer.clear();
        for (kind, mut pendings) in Kind::ALL.into_iter().zip(by_kind) {
            while !pendings.is_empty() {
                let rest = pendings.split_off(pendings.len().min(MAX_KEYS));
                self.enqueue(names, kind, false, pendings);
                pendings = rest;
            }
        }
        self.send()
    }

    fn enqueue(&mut self, names: &Names, kind: Kind, by_text: bool, pendings: Vec<Pending>) {
        // A hash that the server has forgotten would lie unseen in an answer that nobody reads.
        let unread = pendings.iter().any(|pending| pending.ticket.is_none());
        let call = if by_text || unread {
            Call::Text(kind.text())
        } else {
            Call::Hash(self.wire.hash(kind))
        };
        let commands = pendings.iter().map(|pending| &pending.command);
        script::encode(&mut self.buffer, call, kind, names, commands);
        self.in_flight.push_back(Exchange {
            kind,
            by_text,
            pendings,
        });
    }

    fn send(&mut self) -> Result<(), Error> {
        let sent = self.wire.send(&self.buffer);
        self.cut = sent.is_err();
        self.buffer.clear();
        self.buffer.shrink_to(64 * 1024);
        sent
    }

    /// Reads every answer that is owed, oldest first, within `timeout` in all, and hands each
    /// command to `deliver` with its outcome.
    pub(crate) fn read(
        &mut self,
        names: &Names,
        timeout: Duration,
        deliver: &mut impl FnMut(Pending, Result<Reply, Error>),
    ) -> Result<(), Error> {
        let deadline = Moment::now().after(timeout);
        while let Some(exchange) = self.in_flight.front() {
            let (kind, n, by_text) = (exchange.kind, exchange.pendings.len(), exchange.by_text);
            let value = self.wire.receive(deadline.since(Moment::now()))?;
            let outcomes = match script::decode(kind, n, value) {
                Decoded::Outcomes(outcomes) => outcomes,
                Decoded::Refused(error) => {
                    if error.kind() == ErrorKind::Unavailable {
                        // Another connection may lead to a server that can (a new primary).
                        self.wire.discard();
                    }
                    vec![Err(error); n]
                }
                Decoded::NoScript if !by_text => {
                    self.repeat_by_text(names)?;
                    continue;
                }
                Decoded::NoScript => {
                    self.wire.discard();
                    let message = "NOSCRIPT in answer to a script's text";
                    return Err(Error::new(ErrorKind::Protocol, message));
                }
                Decoded::Nonsense(error) => {
                    self.wire.discard();
                    return Err(error);
                }
            };
            let exchange = self.in_flight.pop_front().expect("it was just looked at");
            for (pending, outcome) in exchange.pendings.into_iter().zip(outcomes) {
                deliver(pending, outcome);
            }
        }
        Ok(())
    }

    /// The server has forgotten the script (SCRIPT FLUSH, a fail-over): nothing was executed, so
    /// the same commands go out again with the script's text, which also teaches it anew. Acquires
    /// that nobody waits for any more stay behind.
    fn repeat_by_text(&mut self, names: &Names) -> Result<(), Error> {
        let Some(exchange) = self.in_flight.pop_front() else {
            return Ok(());
        };
        let mut pendings = exchange.pendings;
        pendings.retain(Pending::is_wanted);
        if pendings.is_empty() {
            return Ok(());
        }
        self.enqueue(names, exchange.kind, true, pendings);
        self.send()
    }

    /// False once the connection must not be used again.
    pub(crate) fn is_usable(&self) -> bool {
        !self.wire.is_discarded()
    }

    /// Gives the connection up and returns what was in flight, oldest first. Behind acquires
    /// that were written and not answered their releases are written first: whenever the server
    /// comes to read them, it reads both.
    pub(crate) fn abandon(mut self, names: &Names) -> Vec<Pending> {
        self.wire.discard();
        let in_flight: Vec<Pending> = std::mem::take(&mut self.in_flight)
            .into_iter()
            .flat_map(|exchange| exchange.pendings)
            .collect();
        let releases: Vec<Command> = in_flight
            .iter()
            .filter_map(|pending| pending.undo(Moment::now()))
            .collect();
        if !releases.is_empty() && !self.cut {
            self.buffer.clear();
            let call = Call::Text(Kind::Release.text());
            let commands = releases.iter();
            script::encode(&mut self.buffer, call, Kind::Release, names, commands);
            // Best effort: the releases are repeated on other connections anyway.
            let _ = self.wire.send(&self.buffer);
        }
        in_flight
    }
}
