//! The thread of a proxy, and the state that it shares with the test. Every byte moves under one mutex, so a
//! fault applies from the moment when its setter returns. Never blocks on a socket.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use socket2::{Domain, SockRef, Socket, Type};

use crate::flow::Flow;

/// The current faults of the network.
#[derive(Default)]
pub(crate) struct Faults {
    pub(crate) delay: Duration,
    pub(crate) black_hole: bool,
    pub(crate) hold_requests: bool,
    pub(crate) hold_replies: bool,
    pub(crate) cut_after: Option<usize>,
    pub(crate) refuse: bool,
}

impl Faults {
    fn requests_held(&self) -> bool {
        self.black_hole || self.hold_requests
    }

    fn replies_held(&self) -> bool {
        self.black_hole || self.hold_replies
    }

    /// Counts the bytes to the server; returns true once, when the connection is to be cut.
    fn is_cut(&mut self, written: usize, wanted: bool) -> bool {
        let Some(left) = &mut self.cut_after else {
            return false;
        };
        *left -= written;
        let cut = *left == 0 && (written > 0 || wanted);
        if cut {
            self.cut_after = None;
        }
        cut
    }
}

/// A client's connection, and the connection to the server for it.
struct Pair {
    id: u64,
    client: Arc<TcpStream>,
    server: Arc<TcpStream>,
    connected: bool,
    /// Whether the proxy delivers no further bytes of this connection.
    forgotten: bool,
    requests: Flow,
    replies: Flow,
}

#[derive(Clone, Copy, PartialEq)]
enum Side {
    Client,
    Server,
}

/// A socket to watch, and the events of interest.
struct Interest {
    id: u64,
    side: Side,
    stream: Arc<TcpStream>,
    flags: PollFlags,
}

impl Pair {
    fn open(id: u64, client: TcpStream, upstream_port: u16) -> io::Result<Pair> {
        client.set_nonblocking(true)?;
        client.set_nodelay(true)?;
        let server = Socket::new(Domain::IPV4, Type::STREAM, None)?;
        server.set_nonblocking(true)?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, upstream_port));
        match server.connect(&address.into()) {
            Err(error) if error.raw_os_error() != Some(Errno::INPROGRESS.raw_os_error()) => {
                return Err(error);
            }
            _ => {}
        }
        server.set_tcp_nodelay(true)?;
        let (client, server) = (Arc::new(client), Arc::new(TcpStream::from(server)));
        let (requests, replies) = (Flow::default(), Flow::default());
        Ok(Pair {
            id,
            client,
            server,
            connected: false,
            forgotten: false,
            requests,
            replies,
        })
    }

    fn requests_held(&self, faults: &Faults) -> bool {
        self.forgotten || faults.requests_held()
    }

    fn replies_held(&self, faults: &Faults) -> bool {
        self.forgotten || faults.replies_held()
    }

    /// The number of bytes that have come so far, in both directions.
    fn arrived(&self) -> usize {
        self.requests.arrived() + self.replies.arrived()
    }

    /// Moves the bytes that can move; returns false when the connection is over.
    fn advance(&mut self, faults: &mut Faults, ready: [bool; 2], buffer: &mut [u8]) -> bool {
        let [client_ready, server_ready] = ready;
        let requests_held = self.requests_held(faults);
        let replies_held = self.replies_held(faults);
        if server_ready && !self.connected {
            if !matches!(self.server.take_error(), Ok(None)) {
                return false;
            }
            self.connected = self.server.peer_addr().is_ok();
        }
        if client_ready && self.requests.fill(&self.client, requests_held, buffer) {
            self.replies.refuse();
        }
        if self.connected {
            let server_broke =
                server_ready && self.replies.fill(&self.server, replies_held, buffer);
            if server_broke {
                self.requests.refuse();
            }
            if !requests_held && self.send_requests(faults) {
                return false;
            }
        }
        if !replies_held {
            self.replies.drain(&self.client, faults.delay, usize::MAX);
        }
        !self.replies.is_over()
    }

    /// Passes the requests on. Returns true when the connection is to be cut.
    fn send_requests(&mut self, faults: &mut Faults) -> bool {
        let wanted = self
            .requests
            .due(faults.delay)
            .is_some_and(|due| due <= Instant::now());
        let budget = faults.cut_after.unwrap_or(usize::MAX);
        let written = self.requests.drain(&self.server, faults.delay, budget);
        faults.is_cut(written, wanted)
    }

    /// The events to wait for. Sockets without interest are left out, since a closed one would always be
    /// ready.
    fn interests(&self, faults: &Faults) -> impl Iterator<Item = Interest> {
        let when = |condition, flags| if condition { flags } else { PollFlags::empty() };
        let (requests_held, replies_held) = (self.requests_held(faults), self.replies_held(faults));
        let client = when(self.requests.wants_bytes(requests_held), PollFlags::IN)
            | when(self.replies.is_blocked() && !replies_held, PollFlags::OUT);
        let server = when(
            self.connected && self.replies.wants_bytes(replies_held),
            PollFlags::IN,
        ) | when(self.requests.is_blocked() && !requests_held, PollFlags::OUT)
            | when(!self.connected, PollFlags::OUT);
        [
            (Side::Client, &self.client, client),
            (Side::Server, &self.server, server),
        ]
        .into_iter()
        .filter(|(_, _, flags)| !flags.is_empty())
        .map(|(side, stream, flags)| Interest {
            id: self.id,
            side,
            stream: Arc::clone(stream),
            flags,
        })
    }

    /// The time at which delayed bytes are due.
    fn next_due(&self, faults: &Faults) -> Option<Instant> {
        let requests_wait =
            !self.connected || self.requests_held(faults) || self.requests.is_blocked();
        let replies_wait = self.replies_held(faults) || self.replies.is_blocked();
        let requests = (!requests_wait)
            .then(|| self.requests.due(faults.delay))
            .flatten();
        let replies = (!replies_wait)
            .then(|| self.replies.due(faults.delay))
            .flatten();
        requests.into_iter().chain(replies).min()
    }

    /// Shuts both ends down now. A drop might not close the sockets, since the thread that waits for them may still
    /// have a reference. An error means that the other side has closed the connection already.
    fn cut(&self) {
        let _ = self.server.shutdown(Shutdown::Both);
        let _ = self.client.shutdown(Shutdown::Both);
    }
}

pub(crate) struct State {
    pub(crate) faults: Faults,
    listener: Arc<TcpListener>,
    /// The servers' ports: new connections go to each in turn.
    pub(crate) upstream_ports: Vec<u16>,
    pairs: Vec<Pair>,
    last_id: u64,
    closing: bool,
}

impl State {
    /// Accepts new connections.
    fn accept(&mut self) {
        while let Ok((client, _)) = self.listener.accept() {
            if self.faults.refuse {
                continue;
            }
            self.last_id += 1;
            let port = self.upstream_ports[0];
            self.upstream_ports.rotate_left(1);
            // Fails when there is no server: the client sees its connection closed.
            self.pairs.extend(Pair::open(self.last_id, client, port));
        }
    }

    pub(crate) fn connections(&mut self) -> usize {
        self.accept();
        self.pairs.len()
    }

    pub(crate) fn cut_all(&mut self) {
        self.accept();
        self.pairs.drain(..).for_each(|pair| pair.cut());
    }

    /// The connections, each with the number of bytes that have come on it so far.
    pub(crate) fn traffic(&mut self) -> Vec<(u64, usize)> {
        self.accept();
        let pairs = self.pairs.iter();
        pairs.map(|pair| (pair.id, pair.arrived())).collect()
    }

    /// Forgets the connections whose traffic is still the same. Returns how many there are.
    pub(crate) fn forget(&mut self, unchanged: &[(u64, usize)]) -> usize {
        let pairs = self.pairs.iter_mut();
        let silent = pairs.filter(|pair| unchanged.contains(&(pair.id, pair.arrived())));
        silent.map(|pair| pair.forgotten = true).count()
    }

    pub(crate) fn held_bytes(&self) -> usize {
        self.pairs
            .iter()
            .map(|pair| pair.requests.queued() + pair.replies.queued())
            .sum()
    }

    fn advance(&mut self, ready: &[(u64, Side)], buffer: &mut [u8]) {
        let faults = &mut self.faults;
        self.pairs.retain_mut(|pair| {
            let is_ready = |side| ready.contains(&(pair.id, side));
            let ready = [is_ready(Side::Client), is_ready(Side::Server)];
            let alive = pair.advance(faults, ready, buffer);
            if !alive {
                pair.cut();
            }
            alive
        });
    }
}

pub(crate) struct Relay {
    state: Mutex<State>,
    /// A byte written to `wake` ends the thread's wait on `woken`.
    wake: UnixStream,
    woken: UnixStream,
}

impl Relay {
    pub(crate) fn new(listener: TcpListener, upstream_port: u16) -> io::Result<Relay> {
        listener.set_nonblocking(true)?;
        let (wake, woken) = UnixStream::pair()?;
        wake.set_nonblocking(true)?;
        woken.set_nonblocking(true)?;
        let state = State {
            faults: Faults::default(),
            listener: Arc::new(listener),
            upstream_ports: vec![upstream_port],
            pairs: Vec::new(),
            last_id: 0,
            closing: false,
        };
        Ok(Relay {
            state: Mutex::new(state),
            wake,
            woken,
        })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads or changes the state, and wakes the thread.
    pub(crate) fn with<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let outcome = change(&mut self.lock());
        // If the socket is full, the thread is about to wake up anyway.
        let _ = (&self.wake).write(&[0]);
        outcome
    }

    /// Ends [`run`](Relay::run) and every connection.
    pub(crate) fn close(&self) {
        self.with(|state| {
            state.cut_all();
            state.closing = true;
            // Another thread may be starting a process, which has a copy of the listener until it executes its program.
            // This call closes the port at once. macOS refuses the call, so the port stays open there for that time.
            let _ = SockRef::from(&*state.listener).shutdown(Shutdown::Both);
        });
    }

    /// The thread's main loop.
    pub(crate) fn run(&self) {
        let mut buffer = vec![0; 64 << 10];
        let mut ready = Vec::new();
        loop {
            let (interests, listener, due) = {
                let mut state = self.lock();
                if state.closing {
                    return;
                }
                state.accept();
                state.advance(&ready, &mut buffer);
                let interests: Vec<Interest> = state
                    .pairs
                    .iter()
                    .flat_map(|pair| pair.interests(&state.faults))
                    .collect();
                let due = state
                    .pairs
                    .iter()
                    .filter_map(|pair| pair.next_due(&state.faults))
                    .min();
                (interests, Arc::clone(&state.listener), due)
            };
            ready = self.wait(&interests, &listener, due);
        }
    }

    /// Waits until a socket is ready, the state was changed, or `due`.
    fn wait(
        &self,
        interests: &[Interest],
        listener: &TcpListener,
        due: Option<Instant>,
    ) -> Vec<(u64, Side)> {
        let mut fds = vec![
            PollFd::new(&self.woken, PollFlags::IN),
            PollFd::new(listener, PollFlags::IN),
        ];
        fds.extend(
            interests
                .iter()
                .map(|each| PollFd::new(&*each.stream, each.flags)),
        );
        let limit = due.map(|due| {
            let left = due.saturating_duration_since(Instant::now());
            Timespec::try_from(left).expect("a delay is shorter than 292 billion years")
        });
        // An error is EINTR, or too little memory. Nothing is ready then, and the next round polls again.
        let _ = poll(&mut fds, limit.as_ref());
        let mut bytes = [0; 64];
        while (&self.woken)
            .read(&mut bytes)
            .is_ok_and(|count| count == bytes.len())
        {}
        let is_ready = fds[2..].iter().map(|fd| !fd.revents().is_empty());
        interests
            .iter()
            .zip(is_ready)
            .filter(|(_, is_ready)| *is_ready)
            .map(|(each, _)| (each.id, each.side))
            .collect()
    }
}
