//! Measures the speed limit of leasehold's scripts: group commit on two connections, as in the library, and nothing
//! else. This code has no deadlines, timers, renewals or tracking. It does not read tokens, and keeps exclusion only
//! without faults. It does not use redis-rs, which is a part of the library's cost. The difference between this limit
//! and the library's speed is the cost of the library.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

#[path = "../../../lua/parts.rs"]
mod parts;

use anyhow::{Context as _, bail, ensure};
use leasehold_load::{Locker, hold};

use parts::whole;

const ACQUIRE: &str = include_str!("../../../lua/acquire.lua");
const RELEASE: &str = include_str!("../../../lua/release.lua");
/// The prefix of the queues' keys.
const QUEUE: &[u8] = b"limit:~queue:";

/// The number of connections for requests, as in the library.
const PIPELINES: usize = 2;
const MAX_BATCH: usize = 128;
const MAX_UNANSWERED: usize = 64;
/// How long a reply may take.
const SILENCE: Duration = Duration::from_secs(5);

/// The state that all threads of a process share.
pub struct Limit {
    pipelines: [Mutex<Pipeline>; PIPELINES],
    acquire: String,
    release: String,
}

struct Pipeline {
    /// Whether a thread leads: it writes to the connection and reads from it.
    is_led: bool,
    wire: Option<Wire>,
    queue: Vec<Request>,
}

struct Request {
    key: Arc<str>,
    lease: [u8; 32],
    /// The thread that waits for the reply. `None` for a release.
    waiter: Option<Arc<Waiter>>,
}

struct Waiter {
    thread: Thread,
    signal: AtomicU8,
}

const NOTHING: u8 = 0;
const GRANTED: u8 = 1;
const APPOINTED: u8 = 2;

impl Waiter {
    fn wait(&self) -> anyhow::Result<u8> {
        let started = Instant::now();
        loop {
            match self.signal.load(Ordering::Acquire) {
                NOTHING => thread::park_timeout(SILENCE),
                signal => return Ok(signal),
            }
            // If a leader fails, its own error reports why. The threads that wait for it end here.
            ensure!(started.elapsed() < SILENCE, "no reply came");
        }
    }

    fn wake(&self, signal: u8) {
        self.signal.store(signal, Ordering::Release);
        self.thread.unpark();
    }
}

impl Limit {
    pub fn connect(url: &str) -> anyhow::Result<Self> {
        let address = url.strip_prefix("redis://").context("not a plain URL")?;
        let pipeline = || {
            let wire = Some(Wire::connect(address)?);
            let (is_led, queue) = (false, Vec::new());
            anyhow::Ok(Mutex::new(Pipeline {
                is_led,
                wire,
                queue,
            }))
        };
        let mut wire = Wire::connect(address)?;
        Ok(Self {
            pipelines: [pipeline()?, pipeline()?],
            acquire: wire.load(&whole(ACQUIRE))?,
            release: wire.load(&whole(RELEASE))?,
        })
    }

    fn acquire(&self, pipeline: &Mutex<Pipeline>, request: Request) -> anyhow::Result<()> {
        let own = request.waiter.clone().context("no thread waits for it")?;
        let mut state = locked(pipeline);
        state.queue.push(request);
        let is_led = std::mem::replace(&mut state.is_led, true);
        drop(state);
        if is_led && own.wait()? == GRANTED {
            return Ok(());
        }
        self.lead(pipeline, &own)
    }

    /// Writes and reads until `own` has its reply, and appoints the next leader.
    fn lead(&self, pipeline: &Mutex<Pipeline>, own: &Arc<Waiter>) -> anyhow::Result<()> {
        let mut is_over = false;
        while !is_over {
            let mut state = locked(pipeline);
            let first = state.queue.len().min(MAX_BATCH);
            let batch: Vec<_> = state.queue.drain(..first).collect();
            let mut wire = state.wire.take().context("it is led")?;
            drop(state);
            self.write(&mut wire, &batch)?;
            wire.read_all()?;
            for waiter in batch.into_iter().filter_map(|request| request.waiter) {
                if Arc::ptr_eq(&waiter, own) {
                    is_over = true;
                } else {
                    waiter.wake(GRANTED);
                }
            }
            locked(pipeline).wire = Some(wire);
        }
        let mut state = locked(pipeline);
        let next = state
            .queue
            .iter()
            .find_map(|request| request.waiter.clone());
        if let Some(next) = next {
            drop(state);
            next.wake(APPOINTED);
            return Ok(());
        }
        state.is_led = false;
        self.write_releases(&mut state)
    }

    /// Writes releases. Threads do not wait for the replies, which the next leader reads.
    fn write_releases(&self, pipeline: &mut Pipeline) -> anyhow::Result<()> {
        let wire = pipeline.wire.as_mut().context("nobody leads")?;
        if pipeline.queue.is_empty() || wire.unanswered >= MAX_UNANSWERED {
            return Ok(());
        }
        self.write(wire, &std::mem::take(&mut pipeline.queue))
    }

    fn release(&self, pipeline: &Mutex<Pipeline>, request: Request) -> anyhow::Result<()> {
        let mut state = locked(pipeline);
        state.queue.push(request);
        if state.is_led {
            return Ok(());
        }
        self.write_releases(&mut state)
    }

    fn write(&self, wire: &mut Wire, batch: &[Request]) -> anyhow::Result<()> {
        let (acquires, releases): (Vec<_>, Vec<_>) =
            batch.iter().partition(|request| request.waiter.is_some());
        if !releases.is_empty() {
            wire.call(&self.release, &releases, true, releases.len());
            releases.iter().for_each(|one| wire.word(&one.lease));
        }
        if !acquires.is_empty() {
            wire.call(&self.acquire, &acquires, false, 1 + 3 * acquires.len());
            wire.word(&[b'0'; 32]);
            for one in acquires {
                for word in [&one.lease[..], b"30000", b""] {
                    wire.word(word);
                }
            }
        }
        wire.send()
    }
}

fn locked(pipeline: &Mutex<Pipeline>) -> MutexGuard<'_, Pipeline> {
    pipeline.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Wire {
    stream: BufReader<TcpStream>,
    buffer: Vec<u8>,
    line: Vec<u8>,
    /// Replies that have not been read.
    unanswered: usize,
}

impl Wire {
    fn connect(address: &str) -> anyhow::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream: BufReader::with_capacity(16 * 1024, stream),
            buffer: Vec::new(),
            line: Vec::new(),
            unanswered: 0,
        })
    }

    fn load(&mut self, script: &str) -> anyhow::Result<String> {
        self.head(b'*', 3);
        for word in ["SCRIPT", "LOAD", script] {
            self.word(word.as_bytes());
        }
        self.unanswered += 1;
        self.send()?;
        self.read_all()?;
        Ok(str::from_utf8(&self.line)?.trim_end().to_owned())
    }

    fn call(&mut self, hash: &str, requests: &[&Request], with_queues: bool, arguments: usize) {
        let keys = 1 + requests.len() * if with_queues { 2 } else { 1 };
        self.head(b'*', 3 + keys + arguments);
        self.word(b"EVALSHA");
        self.word(hash.as_bytes());
        self.word(keys.to_string().as_bytes());
        self.word(b"limit:~fence");
        requests
            .iter()
            .for_each(|one| self.word(one.key.as_bytes()));
        if with_queues {
            for one in requests {
                self.head(b'$', QUEUE.len() + one.key.len());
                self.buffer.extend_from_slice(QUEUE);
                self.buffer.extend_from_slice(one.key.as_bytes());
                self.buffer.extend_from_slice(b"\r\n");
            }
        }
        self.unanswered += 1;
    }

    fn word(&mut self, word: &[u8]) {
        self.head(b'$', word.len());
        self.buffer.extend_from_slice(word);
        self.buffer.extend_from_slice(b"\r\n");
    }

    fn head(&mut self, sign: u8, length: usize) {
        self.buffer.push(sign);
        let _ = write!(self.buffer, "{length}\r\n");
    }

    fn send(&mut self) -> anyhow::Result<()> {
        self.stream.get_mut().write_all(&self.buffer)?;
        self.buffer.clear();
        Ok(())
    }

    fn read_all(&mut self) -> anyhow::Result<()> {
        for _ in 0..std::mem::take(&mut self.unanswered) {
            self.read()?;
        }
        Ok(())
    }

    /// Reads one reply. Its last line stays in `line`.
    fn read(&mut self) -> anyhow::Result<()> {
        self.read_line()?;
        let said = || String::from_utf8_lossy(&self.line);
        let number = str::from_utf8(&self.line[1..])?.trim_end().parse();
        match (self.line[0], number) {
            (b'*', Ok(answers)) => (0..answers).try_for_each(|_| self.read()),
            (b'$', Ok(1..)) => self.read_line(),
            (b':', Ok(1)) => Ok(()),
            _ => bail!("a lock was lost: {}", said()),
        }
    }

    fn read_line(&mut self) -> anyhow::Result<()> {
        self.line.clear();
        self.stream.read_until(b'\n', &mut self.line)?;
        ensure!(!self.line.is_empty(), "the connection ended");
        Ok(())
    }
}

/// The lock of one thread.
pub struct Limited {
    limit: Arc<Limit>,
    pipeline: usize,
    key: Arc<str>,
    lease: [u8; 32],
    taken: u64,
}

impl Limited {
    pub fn new(limit: &Arc<Limit>, key: String, seat: usize) -> Self {
        Self {
            limit: Arc::clone(limit),
            pipeline: seat % PIPELINES,
            key: key.into(),
            lease: [b'0'; 32],
            taken: (seat as u64) << 40,
        }
    }

    fn request(&self, waiter: Option<Arc<Waiter>>) -> Request {
        Request {
            key: Arc::clone(&self.key),
            lease: self.lease,
            waiter,
        }
    }
}

impl Locker for Limited {
    async fn pair(&mut self, time: Duration) -> anyhow::Result<u64> {
        let pipeline = &self.limit.pipelines[self.pipeline];
        self.taken += 1;
        write!(&mut self.lease[..], "{:032x}", self.taken)?;
        let waiter = Arc::new(Waiter {
            thread: thread::current(),
            signal: AtomicU8::new(NOTHING),
        });
        self.limit.acquire(pipeline, self.request(Some(waiter)))?;
        let acquired = hold(time);
        self.limit.release(pipeline, self.request(None))?;
        Ok(acquired)
    }
}
