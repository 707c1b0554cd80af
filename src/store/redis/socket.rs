//! A socket to Redis on which everything has a deadline: connecting, writing, and reading a reply, in however many
//! pieces it comes. Knows no command.

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::io::{self, Write};
use std::net::{Shutdown, ToSocketAddrs};
use std::sync::{Arc, Weak};
use std::time::Duration;

use redis::{ConnectionAddr, RedisResult, Value};
use socket2::{SockAddr, Socket, Type};

use crate::store::redis::replies::{Limit, Replies};
use crate::util::clock::MonotonicTime;

/// The shortest time-out that is set on a socket: zero would be none at all.
const SHORTEST: Duration = Duration::from_millis(1);
/// A socket's time-out that differs by less is left as it is, since setting it is a system call. If it ends before the
/// deadline, the read or write is repeated.
const SLACK: Duration = Duration::from_millis(10);

/// Connects by `deadline`. Only the resolver of host names keeps to time-outs of its own.
pub(crate) fn connect(
    addr: &ConnectionAddr,
    deadline: MonotonicTime,
) -> io::Result<(Sender, Receiver)> {
    let socket = match addr {
        ConnectionAddr::Tcp(host, port) => {
            let mut connected = Err(io::Error::other("the host's name has no address"));
            for address in (host.as_str(), *port).to_socket_addrs()? {
                connected = connect_to(&address.into(), deadline);
                if connected.is_ok() {
                    break;
                }
            }
            let socket = connected?;
            // Without it a release and the acquire behind it wait for each other's acknowledgement.
            socket.set_tcp_nodelay(true)?;
            socket
        }
        #[cfg(unix)]
        ConnectionAddr::Unix(path) => connect_to(&SockAddr::unix(path)?, deadline)?,
        _ => {
            let message = "this kind of address is not supported";
            return Err(io::Error::new(io::ErrorKind::Unsupported, message));
        }
    };
    let socket = Arc::new(socket);
    let sender = Sender {
        socket: Arc::clone(&socket),
        timeout: None,
    };
    let receiver = Receiver {
        socket,
        timeout: None,
        passed: None,
        replies: Replies::new(),
    };
    Ok((sender, receiver))
}

fn connect_to(address: &SockAddr, deadline: MonotonicTime) -> io::Result<Socket> {
    let socket = Socket::new(address.domain(), Type::STREAM, None)?;
    let left = left_until(deadline).ok_or(io::ErrorKind::TimedOut)?;
    socket.connect_timeout(address, left.max(SHORTEST))?;
    Ok(socket)
}

/// The half that writes.
pub(crate) struct Sender {
    socket: Arc<Socket>,
    /// As it is set on the socket.
    timeout: Option<Duration>,
}

impl Sender {
    /// Writes all of `bytes`. After an error a part of them may have been written.
    pub(crate) fn send(&mut self, mut bytes: &[u8], deadline: MonotonicTime) -> io::Result<()> {
        let mut turn = Turn::First;
        while !bytes.is_empty() {
            let set = |timeout| self.socket.set_write_timeout(Some(timeout));
            turn.begin(&mut self.timeout, deadline, set)?;
            match (&*self.socket).write(bytes) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => bytes = &bytes[n..],
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The means to close the socket from another thread.
    pub(crate) fn closer(&self) -> Closer {
        Closer(Arc::downgrade(&self.socket))
    }
}

/// The half that reads.
pub(crate) struct Receiver {
    socket: Arc<Socket>,
    /// As it is set on the socket.
    timeout: Option<Duration>,
    /// The last deadline that had passed when a read began. One such read is made for each deadline.
    passed: Option<MonotonicTime>,
    replies: Replies,
}

impl Receiver {
    /// The next reply, of `limit` bytes at most: see [`Replies::next`].
    pub(crate) fn receive(&mut self, deadline: MonotonicTime, limit: Limit) -> RedisResult<Value> {
        self.receive_any(deadline, limit, |_| true)
    }

    /// As [`receive`](Self::receive), without the messages that the server sends unasked.
    pub(crate) fn receive_reply(
        &mut self,
        deadline: MonotonicTime,
        limit: Limit,
    ) -> RedisResult<Value> {
        self.receive_any(deadline, limit, |value| {
            !matches!(value, Value::Push { .. })
        })
    }

    fn receive_any(
        &mut self,
        deadline: MonotonicTime,
        limit: Limit,
        is_wanted: impl Fn(&Value) -> bool,
    ) -> RedisResult<Value> {
        let mut turn = Turn::First;
        loop {
            match self.received(limit)? {
                Some(value) if is_wanted(&value) => return Ok(value),
                Some(_) => {}
                None => self.read(&mut turn, deadline, limit)?,
            }
        }
    }

    /// The next reply, if it has come in.
    pub(crate) fn received(&mut self, limit: Limit) -> RedisResult<Option<Value>> {
        self.replies.next(limit)
    }

    /// Size of the last reply, as it counts towards its limit.
    pub(crate) fn last_size(&self) -> usize {
        self.replies.last_size()
    }

    /// Whether a part of a reply has come in.
    pub(crate) fn is_amid_reply(&self) -> bool {
        self.replies.is_amid_reply()
    }

    /// Waits until more has come in.
    pub(crate) fn wait(&mut self, deadline: MonotonicTime, limit: Limit) -> io::Result<()> {
        self.read(&mut Turn::First, deadline, limit)
    }

    fn read(&mut self, turn: &mut Turn, deadline: MonotonicTime, limit: Limit) -> io::Result<()> {
        // Once per deadline: a server could send many replies one by one, each just in time.
        let is_past = left_until(deadline).is_none();
        if is_past && self.passed.replace(deadline) == Some(deadline) {
            *turn = Turn::Later;
        }
        loop {
            let set = |timeout| self.socket.set_read_timeout(Some(timeout));
            turn.begin(&mut self.timeout, deadline, set)?;
            match self.replies.fill(limit, &*self.socket) {
                Ok(()) => return Ok(()),
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Closes a socket for reading and writing. Does not keep it open.
#[derive(Clone)]
pub(crate) struct Closer(Weak<Socket>);

impl Closer {
    pub(crate) fn close(&self) {
        if let Some(socket) = self.0.upgrade() {
            // One that the other side has closed already is as good.
            let _ = socket.shutdown(Shutdown::Both);
        }
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Weak::ptr_eq(&self.0, &other.0)
    }

    /// Whether one of the halves of the socket still exists.
    pub(crate) fn is_open(&self) -> bool {
        self.0.strong_count() > 0
    }
}

/// Which system call of one operation comes next.
enum Turn {
    /// Made even after the deadline: a busy machine may have kept this thread from a reply that came in time.
    First,
    Later,
}

impl Turn {
    /// Sets the socket's time-out so that the next system call ends by `deadline`, or a little later. `TimedOut` if it
    /// must not be made any more.
    fn begin(
        &mut self,
        current: &mut Option<Duration>,
        deadline: MonotonicTime,
        set: impl FnOnce(Duration) -> io::Result<()>,
    ) -> io::Result<()> {
        let left = match (&self, left_until(deadline)) {
            (Self::First, left) => left.unwrap_or(SHORTEST),
            (_, left) => left.ok_or(io::ErrorKind::TimedOut)?,
        };
        let left = left.max(SHORTEST);
        let is_near = current.is_some_and(|current| current.abs_diff(left) <= SLACK);
        if !is_near {
            set(left)?;
            *current = Some(left);
        }
        *self = Self::Later;
        Ok(())
    }
}

/// Whether a system call may be made again after this error; `Turn::begin` looks at the deadline.
fn is_passing(error: &io::Error) -> bool {
    use io::ErrorKind::{Interrupted, TimedOut, WouldBlock};
    matches!(error.kind(), Interrupted | TimedOut | WouldBlock)
}

fn left_until(deadline: MonotonicTime) -> Option<Duration> {
    let left = deadline.since(MonotonicTime::now());
    (!left.is_zero()).then_some(left)
}
