//! Runs a piece of work once for each name. The caller holds the lock of this name during the run, and stores a record
//! of the run as the fenced value of this name.
//!
//! The record is text and bytes: `once1 <state> <token> <start> <end> <holder>`, a line feed, and the result. The state
//! is `done` or `started`. The times are µs since 1970 by the clock of Redis. The record of a start has `-` as its end.

use std::borrow::Cow;
use std::fmt;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam_channel::Receiver;

use crate::acquire::{ClaimResult, Until};
use crate::client::Client;
use crate::command::{LockAndValue, value};
use crate::config::key::Key;
use crate::locks::fenced::{FencedValue, MAX_TTL, MIN_TTL};
use crate::locks::guard::Guard;
use crate::locks::lock::{ClosureGuard, Lock, Ttl};
use crate::locks::mutex::{Mutex, MutexGuard};
use crate::report::error::{Error, ErrorKind};
use crate::report::released::Released;
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, number};

/// The default of [`Once::keep`].
const KEEP: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// The first word of a record, with the version of its form.
const VERSION: &str = "once1";
/// The longest first line of a record: six words, of which the holder has 128 bytes at most.
const LONGEST_HEAD: usize = 256;

/// A piece of work that runs once for its name, no matter how many processes ask for it. From [`Client::once`].
///
/// The name identifies one occurrence of the work, for example by an instant in UTC: `report:2026-11-28T02:00Z`.
/// leasehold does not schedule: your scheduler computes the name, and so decides about time zones and differences of
/// clocks. All processes that compute the same name share one run. To catch up on a missed run, call [`run`](Self::run)
/// with its name.
///
/// While the work runs, its caller holds the [`Mutex`] of this name, which the client renews. When the work has
/// returned `Ok`, its result is stored as the record of the run, and the lock is released. Redis [keeps](Self::keep)
/// the record for seven days. Until then, every call returns [`Run::Done`] with the record, by one request.
///
/// # At least once, or at most once
///
/// No lock can make work run exactly once if the process may fail between the work and its record. Choose what such a
/// failure means:
///
/// | what happens | by default: at least once | with [`at_most_once`](Self::at_most_once) |
/// |---|---|---|
/// | the work returns `Ok` | its record is stored; it never runs again while Redis keeps the record | the same |
/// | the work returns `Err` | no record; the next caller runs it | the same |
/// | the work panics | no record; the next caller runs it | [`Run::Interrupted`] for all callers, until [`forget`](Self::forget) |
/// | its process ends, or is cut off from Redis | no record; another caller runs it when the ttl of the lock ends | when the ttl of the lock ends, [`Run::Interrupted`] for all callers |
/// | the lock is lost while the work runs | its caller gets `LeaseLost`; **another caller may run it at the same time** | its caller gets `LeaseLost`; the others get [`Run::Interrupted`] |
/// | Redis cannot be reached when the work has returned | the client tries to write the record for [`outage_timeout`](crate::Builder::outage_timeout); if that fails, another caller may run it | the client tries for the same time; if that fails, the others get [`Run::Interrupted`] |
/// | Redis loses its data, or a replica without the record takes over | **it may run again** | **it may run again** |
///
/// Redis has one record of the name: that of the run with the greatest fencing token. By default, the work may have had
/// its effects more than once by then. If it changes data elsewhere, pass the
/// [fencing token](MutexGuard::fencing_token), or give the name to a service that accepts it as an idempotency key.
///
/// # Callers that wait
///
/// [`run`](Self::run) waits while another caller's work runs, and then returns its record. The clients of the callers
/// ask Redis to report a change of the record. Until the work ends, each caller sends one request, one more for each
/// ttl of the lock, and one more with [`at_most_once`](Self::at_most_once). Then it sends another request for the
/// record. If the work fails, the caller that asks first runs it.
///
/// Redis does not report the release of a plain [`Mutex`] of the same name to these callers: they ask again when its
/// ttl ends.
///
/// On a [quorum](Client::quorum), every call fails with [`Unsupported`](ErrorKind::Unsupported), without a request: use
/// a [`Mutex`] there, and store the record in the database that the work changes. The calls are also `Unsupported`
/// beside [another library](crate::Builder::compatible_with).
///
/// ```
/// # let client = leasehold::Client::memory()?;
/// use leasehold::{Error, Run};
///
/// let report = client.once("report:2026-11-28T02:00Z");
/// for _ in 0..2 {
///     let run = report.run(|guard| {
///         guard.check()?; // between two steps of long work
///         Ok::<_, Error>("42 mails")
///     })?;
///     match run {
///         Run::Ran(sent) => println!("sent {sent}"),
///         Run::Done(record) => assert_eq!(record.result(), b"42 mails"),
///         Run::Interrupted(_) => unreachable!("only with at_most_once"),
///     }
/// }
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone)]
#[must_use = "this does nothing until it is run"]
pub struct Once {
    lock: Lock,
    keep: Duration,
    at_most_once: bool,
}

/// The outcome of a call of [`Once::run`] or its relatives.
///
/// ```
/// # let client = leasehold::Client::memory()?;
/// use leasehold::{Error, Run};
///
/// let first = client.once("k").run(|_| Ok::<_, Error>(17))?;
/// assert_eq!(first, Run::Ran(17));
/// let Run::Done(record) = client.once("k").run(|_| Ok::<_, Error>(18))? else { panic!() };
/// assert_eq!(record.result(), b"17");
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use = "the work may not have run"]
pub enum Run<T> {
    /// This call has run the work, which returned this value. Redis has the record.
    Ran(T),
    /// An earlier call has run the work.
    Done(Record),
    /// An earlier call with [`at_most_once`](Once::at_most_once) began the work, and did not record its end: its
    /// process ended, the work panicked, or the lock was lost, for example. It is unknown how far the work came.
    /// [`Once::forget`] lets the work run again.
    Interrupted(Record),
}

/// The record of a run in Redis. From [`Once::get`] and [`Run`].
///
/// ```
/// # let client = leasehold::Client::memory()?;
/// use leasehold::Error;
///
/// let once = client.once("k");
/// assert_eq!(once.get()?, None);
/// let _ = once.run(|_| Ok::<_, Error>("42 mails"))?;
/// let record = once.get()?.unwrap();
/// assert!(record.is_done());
/// assert_eq!(record.result(), b"42 mails");
/// assert_eq!(record.holder(), client.holder_id());
/// assert!(record.fencing_token() > 0);
/// assert!(record.ended_at().unwrap() >= record.started_at());
/// # Ok::<(), Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record {
    token: u64,
    holder: HolderId,
    /// In µs since 1970, by the clock of Redis.
    started: u64,
    /// `None` in the record of a start.
    ended: Option<u64>,
    result: Vec<u8>,
}

/// The example of [`Record`] uses every method.
impl Record {
    /// Whether the work has returned `Ok`. Otherwise this is the record of a start, which
    /// [`at_most_once`](Once::at_most_once) writes: the work runs now, or was interrupted.
    pub fn is_done(&self) -> bool {
        self.ended.is_some()
    }

    /// The fencing token under which the work ran.
    pub fn fencing_token(&self) -> u64 {
        self.token
    }

    /// The client that ran the work.
    pub fn holder(&self) -> &HolderId {
        &self.holder
    }

    /// When the work's lock was granted, by the clock of Redis.
    pub fn started_at(&self) -> SystemTime {
        UNIX_EPOCH + Duration::from_micros(self.started)
    }

    /// When the work returned: the time of [`started_at`](Self::started_at), plus the duration that the client
    /// measured. `None` if the work has not returned `Ok`.
    pub fn ended_at(&self) -> Option<SystemTime> {
        let ended = self.ended?;
        Some(UNIX_EPOCH + Duration::from_micros(ended))
    }

    /// The result of the work: the bytes from [`Recordable::to_bytes`].
    pub fn result(&self) -> &[u8] {
        &self.result
    }

    fn encode(&self) -> Vec<u8> {
        let (state, end) = match self.ended {
            Some(ended) => ("done", ended.to_string()),
            None => ("started", "-".to_owned()),
        };
        let Self {
            token,
            holder,
            started,
            ..
        } = self;
        let head = format!("{VERSION} {state} {token} {started} {end} {holder}\n");
        [head.as_bytes(), &self.result].concat()
    }

    /// Reads a record. Refuses every value that this version does not write.
    fn decode(bytes: &[u8]) -> Result<Self, Error> {
        Self::parse(bytes).ok_or_else(|| {
            let message =
                "the fenced value is not a record of a run that this version can read: use another name";
            Error::new(ErrorKind::Protocol, message)
        })
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let length = bytes
            .iter()
            .take(LONGEST_HEAD)
            .position(|byte| *byte == b'\n')?;
        let (head, result) = (&bytes[..length], &bytes[length + 1..]);
        let words: Vec<&str> = std::str::from_utf8(head).ok()?.split(' ').collect();
        let [VERSION, state, token, started, ended, holder] = words[..] else {
            return None;
        };
        let ended = match (state, ended) {
            ("done", ended) => Some(number(ended)?),
            ("started", "-") => None,
            _ => return None,
        };
        let (token, started) = (number(token)?, number(started)?);
        Some(Self {
            token,
            holder: HolderId::decode(holder)?,
            started,
            ended,
            result: result.to_vec(),
        })
    }

    fn into_run<T>(self) -> Run<T> {
        match self.is_done() {
            true => Run::Done(self),
            false => Run::Interrupted(self),
        }
    }
}

/// A result of work that [`Once`] can store: `()`, bytes, text, and whole numbers (as decimal text). Implement it for
/// your own type, or let the work return the bytes of a serializer.
///
/// ```
/// # let client = leasehold::Client::memory()?;
/// use leasehold::{Error, Recordable, Run};
/// use std::borrow::Cow;
///
/// struct Sent { mails: u32 }
/// impl Recordable for Sent {
///     fn to_bytes(&self) -> Cow<'_, [u8]> {
///         format!(r#"{{"mails": {}}}"#, self.mails).into_bytes().into()
///     }
/// }
/// let run = client.once("k").run(|_| Ok::<_, Error>(Sent { mails: 42 }))?;
/// assert!(matches!(run, Run::Ran(Sent { mails: 42 })));
/// assert_eq!(client.once("k").get()?.unwrap().result(), br#"{"mails": 42}"#);
/// # Ok::<(), Error>(())
/// ```
pub trait Recordable {
    /// The bytes of the result in the record.
    fn to_bytes(&self) -> Cow<'_, [u8]>;
}

impl Recordable for () {
    fn to_bytes(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&[])
    }
}

impl<const N: usize> Recordable for [u8; N] {
    fn to_bytes(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(self)
    }
}

macro_rules! recordable {
    ($($bytes:ty),*; $($number:ty),*) => {
        $(impl Recordable for $bytes {
            fn to_bytes(&self) -> Cow<'_, [u8]> {
                Cow::Borrowed(AsRef::<[u8]>::as_ref(self))
            }
        })*
        $(impl Recordable for $number {
            fn to_bytes(&self) -> Cow<'_, [u8]> {
                Cow::Owned(self.to_string().into_bytes())
            }
        })*
    };
}
recordable!(Vec<u8>, Box<[u8]>, &[u8], String, &str; u8, u16, u32, u64, usize, i8, i16, i32, i64, isize);

impl Mutex {
    /// A [`Once`] with this key and these settings. The same as [`Client::once`], which has the usual settings.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// use std::time::Duration;
    ///
    /// let once = client.mutex("k").max_hold(Duration::from_secs(3600)).once();
    /// let _ = once.run(|_| Ok::<_, leasehold::Error>(()))?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn once(self) -> Once {
        Once {
            lock: self.lock,
            keep: KEEP,
            at_most_once: false,
        }
    }
}

impl Once {
    pub(crate) fn new(client: Client, key: &str) -> Self {
        Mutex::new(client, key).once()
    }

    /// Sets for how long Redis keeps the record after a client has written it. Afterwards, the next caller runs the
    /// work again. So choose a time that is much longer than the work, than any pause of a process, and than the time
    /// during which processes ask for this name. 10 ms to ten years. Defaults to seven days.
    ///
    /// ```
    /// # use std::time::Duration;
    /// use leasehold::{Error, Run};
    ///
    /// let memory = leasehold::MemoryStore::new(); // its clock can be moved
    /// let client = memory.client()?;
    /// let once = client.once("k").keep(Duration::from_secs(24 * 60 * 60));
    /// assert!(matches!(once.run(|_| Ok::<_, Error>(()))?, Run::Ran(())));
    /// memory.advance(Duration::from_secs(23 * 60 * 60));
    /// assert!(matches!(once.run(|_| Ok::<_, Error>(()))?, Run::Done(_)));
    /// memory.advance(Duration::from_secs(2 * 60 * 60));
    /// assert!(matches!(once.run(|_| Ok::<_, Error>(()))?, Run::Ran(())));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn keep(mut self, keep: Duration) -> Self {
        self.keep = keep;
        self
    }

    /// Records the start before the work begins, which takes one more request. If the process fails, the work does not
    /// begin again: other callers get [`Run::Interrupted`] until [`forget`](Self::forget). If the work returns `Err`,
    /// the client deletes the record of the start, and the next caller runs the work. The
    /// [table](Self#at-least-once-or-at-most-once) compares both ways.
    ///
    /// ```
    /// use leasehold::{Error, Run};
    /// use std::panic::catch_unwind;
    ///
    /// let memory = leasehold::MemoryStore::new();
    /// let client = memory.client()?;
    /// let payment = client.once("payment:42").at_most_once();
    /// let fails = || payment.run(|_| -> Result<(), Error> { panic!("half way") });
    /// assert!(catch_unwind(fails).is_err());
    ///
    /// let run = payment.run(|_| Ok::<_, Error>(()))?;
    /// assert!(matches!(run, Run::Interrupted(_)), "someone has to look at it");
    /// assert!(payment.forget()?);
    /// assert!(matches!(payment.run(|_| Ok::<_, Error>(()))?, Run::Ran(())));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn at_most_once(mut self) -> Self {
        self.at_most_once = true;
        self
    }

    /// Sets the ttl of the lock, the same as [`Mutex::ttl`]. The client renews the lock while the work runs. After a
    /// crash, other callers wait for this long at most. For the other settings of a lock, see [`Mutex::once`].
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let once = client.once("k").ttl(std::time::Duration::from_secs(5));
    /// let _ = once.run(|_| Ok::<_, leasehold::Error>(()))?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.lock.ttl = Ttl::Renewed(ttl);
        self
    }

    /// Cancels waits when `cancel` gets a message or its senders are dropped, as [`Mutex::cancelled_by`]. Does not end
    /// work that has begun.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// use leasehold::{Error, ErrorKind, crossbeam_channel::bounded};
    ///
    /// let held = client.mutex("k").lock()?; // as if the work ran elsewhere
    /// let (stop, stopped) = bounded(0);
    /// let once = client.once("k").cancelled_by(stopped);
    /// let waiting = std::thread::spawn(move || once.run(|_| Ok::<_, Error>(())).map(drop));
    /// drop(stop);
    /// let error = waiting.join().unwrap().unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::Cancelled);
    /// # Ok::<(), Error>(())
    /// ```
    pub fn cancelled_by(mut self, cancel: Receiver<()>) -> Self {
        self.lock.cancel = Some(cancel);
        self
    }

    /// The name, as it was given; empty if it is not a valid key.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// assert_eq!(client.once("report:2026-11-28").key(), "report:2026-11-28");
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn key(&self) -> &str {
        self.lock.name()
    }

    /// Runs `work`, unless it has run already. Waits while another caller's work runs.
    ///
    /// `work` gets the guard of the lock: for [`check`](MutexGuard::check) between two steps, and for the
    /// [fencing token](MutexGuard::fencing_token). Its result becomes the record, so it has to be [`Recordable`]: at
    /// most [`max_reply_bytes`](crate::Builder::max_reply_bytes) less 1 KiB. `E` is the error type of your work:
    /// `anyhow::Error`, `Box<dyn Error>`, or any type with `From<leasehold::Error>`.
    ///
    /// If `work` calls `run` for the same name, the inner call waits for the outer one without end, as with a
    /// [`Mutex`]. [`try_run`](Self::try_run) returns `Ok(None)` instead.
    ///
    /// # Errors
    /// - The error of `work`, unchanged.
    /// - `LeaseLost` if the lock was lost before its release: another caller may have run the work at the same time.
    ///   The result is dropped; [`get`](Self::get) returns the record that Redis has.
    /// - `Protocol` if the fenced value of this name is not a record; it stays as it is.
    /// - `TooLarge` if the result is too long for a record, and `Timeout` or `Unavailable` if Redis did not confirm the
    ///   record. In these cases the work has run, and the next caller runs it again, or gets [`Run::Interrupted`] with
    ///   [`at_most_once`](Self::at_most_once). `TooLarge` also if the record is longer than this client's
    ///   `max_reply_bytes`.
    /// - `InvalidConfig` if [`keep`](Self::keep) is out of its bounds; `Unsupported` on a quorum; the errors of
    ///   [`Mutex::lock`].
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// use leasehold::{Error, Run};
    ///
    /// let send = |token: u64| -> Result<u32, Box<dyn std::error::Error>> { Ok(42) };
    /// match client.once("report:2026-11-28").run(|guard| send(guard.fencing_token()))? {
    ///     Run::Ran(mails) => println!("sent {mails} mails"),
    ///     Run::Done(record) => println!("{} has sent them", record.holder()),
    ///     Run::Interrupted(record) => println!("{} has begun to", record.holder()),
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn run<T: Recordable, E: From<Error>>(
        &self,
        work: impl FnOnce(&MutexGuard) -> Result<T, E>,
    ) -> Result<Run<T>, E> {
        let run = self.run_until(Until::Forever, work)?;
        Ok(run.expect("a wait without a deadline ends with a run or an error"))
    }

    /// Runs `work`, unless it has run already. Drops `work` and returns `Ok(None)` if another caller's work runs now.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run) except `Cancelled`. If Redis is away when the call begins, it fails within one
    /// [`command_timeout`](crate::Builder::command_timeout).
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// use leasehold::Error;
    ///
    /// let once = client.once("k");
    /// let nested = once.run(|_| Ok::<_, Error>(match once.try_run(|_| Ok::<_, Error>(()))? {
    ///     None => "runs now",
    ///     Some(_) => "not reached",
    /// }))?;
    /// assert_eq!(nested, leasehold::Run::Ran("runs now"));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn try_run<T: Recordable, E: From<Error>>(
        &self,
        work: impl FnOnce(&MutexGuard) -> Result<T, E>,
    ) -> Result<Option<Run<T>>, E> {
        self.run_until(Until::Now, work)
    }

    /// Runs `work`, unless it has run already. Drops `work` and returns `Ok(None)` if another caller's work still runs
    /// after `timeout`. The time does not limit `work`.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run). If Redis is away, the client tries again until `timeout` has passed.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// use std::time::Duration;
    ///
    /// let run = client.once("k").try_run_for(Duration::from_millis(250), |_| Ok::<_, leasehold::Error>(()))?;
    /// assert!(run.is_some());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_run_for<T: Recordable, E: From<Error>>(
        &self,
        timeout: Duration,
        work: impl FnOnce(&MutexGuard) -> Result<T, E>,
    ) -> Result<Option<Run<T>>, E> {
        self.run_until(Until::At(self.lock.client.now().after(timeout)), work)
    }

    /// Waits until `deadline`, and otherwise does the same as [`try_run_for`](Self::try_run_for).
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// use std::time::{Duration, Instant};
    ///
    /// let deadline = Instant::now() + Duration::from_millis(250);
    /// let run = client.once("k").try_run_until(deadline, |_| Ok::<_, leasehold::Error>(()))?;
    /// assert!(run.is_some());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_run_until<T: Recordable, E: From<Error>>(
        &self,
        deadline: Instant,
        work: impl FnOnce(&MutexGuard) -> Result<T, E>,
    ) -> Result<Option<Run<T>>, E> {
        self.try_run_for(deadline.saturating_duration_since(Instant::now()), work)
    }

    /// The record of the run; `None` if the work has not run, or has begun without
    /// [`at_most_once`](Self::at_most_once). Sends one request.
    ///
    /// # Errors
    /// The errors of [`FencedValue::read`]; `Protocol` also if the fenced value of this name is no record.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// assert!(client.once("k").get()?.is_none());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn get(&self) -> Result<Option<Record>, Error> {
        self.check_store()?;
        let bytes = self.value().read()?;
        let record = bytes.map(|bytes| Record::decode(&bytes)).transpose();
        record.map_err(|error| error.with_key(self.key()))
    }

    /// Deletes the record, so the work can run again. Takes the lock to do so, and returns `Ok(false)` if the work runs
    /// now: then nothing changes. Redis keeps the fencing token of this lock for the time in [`keep`](Self::keep), even
    /// if there was no record, and refuses late records of earlier runs.
    ///
    /// # Errors
    /// The errors of [`get`](Self::get), [`Mutex::try_lock`] and [`FencedValue::delete`].
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// use leasehold::{Error, Run};
    ///
    /// let once = client.once("k");
    /// let _ = once.run(|_| Ok::<_, Error>(()))?;
    /// assert!(once.forget()?);
    /// assert!(matches!(once.run(|_| Ok::<_, Error>(()))?, Run::Ran(())));
    /// # Ok::<(), Error>(())
    /// ```
    pub fn forget(&self) -> Result<bool, Error> {
        self.check_store()?;
        self.check_keep()?;
        let Some(guard) = self.lock.acquire(Until::Now)? else {
            return Ok(false);
        };
        let guard = MutexGuard::new(guard);
        self.get()?;
        // Deletes even if there is no record: Redis then refuses a late record, and callers that wait ask again.
        self.value().delete(guard.fencing_token())?;
        guard.finish()?;
        Ok(true)
    }

    fn run_until<T: Recordable, E: From<Error>>(
        &self,
        until: Until,
        work: impl FnOnce(&MutexGuard) -> Result<T, E>,
    ) -> Result<Option<Run<T>>, E> {
        let mut begun = match self.begin(until)? {
            None => return Ok(None),
            Some(Start::Settled(record)) => return Ok(Some(record.into_run())),
            Some(Start::Begun(begun)) => begun,
        };
        let guard = begun.guard();
        match guard.run(|| work(guard)) {
            Ok(result) => {
                begun.end(&result.to_bytes())?;
                Ok(Some(Run::Ran(result)))
            }
            Err(error) => {
                begun.may_run_again = true;
                Err(error)
            }
        }
    }

    /// Takes the lock, unless a record settles the call. Returns `None` if another caller's work still runs at the time
    /// in `until`.
    fn begin(&self, until: Until) -> Result<Option<Start<'_>>, Error> {
        self.check_store()?;
        self.check_keep()?;
        let (client, request) = self.lock.prepare()?;
        let is_settled = |found: &LockAndValue| match &found.value {
            None => Ok(false),
            Some(bytes) => {
                let record = Record::decode(bytes)?;
                Ok(record.is_done() || found.lock.is_none())
            }
        };
        let claim = client
            .acquirer
            .claim(&request, &self.value_key()?, until, is_settled)?;
        let lease = match claim {
            None => return Ok(None),
            Some(ClaimResult::NotGranted(found)) => {
                let record = Record::decode(&found.value.unwrap_or_default())?;
                return Ok(Some(Start::Settled(record)));
            }
            Some(ClaimResult::Granted(lease)) => lease,
        };
        let guard = MutexGuard::new(Guard::new(lease, self.lock.client.clone()));
        let token = guard.fencing_token();
        let start = Record {
            token,
            holder: self.lock.client.holder_id().clone(),
            started: value::micros_of(token),
            ended: None,
            result: Vec::new(),
        };
        let mut begun = Begun {
            once: self,
            start,
            began: self.lock.client.now(),
            guard: Some(guard),
            may_run_again: !self.at_most_once,
        };
        if self.at_most_once
            && let Err(error) = begun.write(token, Some(&begun.start))
        {
            // The work has not begun.
            begun.may_run_again = true;
            return Err(error);
        }
        Ok(Some(Start::Begun(begun)))
    }

    fn value(&self) -> FencedValue {
        FencedValue::new(self.lock.client.clone(), self.key()).ttl(self.keep)
    }

    fn value_key(&self) -> Result<Key, Error> {
        self.value().key
    }

    fn check_store(&self) -> Result<(), Error> {
        let advice = "hold a mutex, and store the record in the database that the work changes";
        self.lock.check_claims(advice)
    }

    fn check_keep(&self) -> Result<(), Error> {
        if (MIN_TTL..=MAX_TTL).contains(&self.keep) {
            return Ok(());
        }
        let error = Error::invalid(
            "keep",
            "10 ms to ten years",
            format_args!("{:?}", self.keep),
        );
        Err(error.with_key(self.key()))
    }
}

impl fmt::Debug for Once {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut output = f.debug_struct("Once");
        self.lock.debug_fields(&mut output);
        output
            .field("keep", &self.keep)
            .field("at_most_once", &self.at_most_once)
            .finish()
    }
}

/// How a call begins.
enum Start<'a> {
    /// A record settles the call.
    Settled(Record),
    Begun(Begun<'a>),
}

/// A run that has begun. If the record of its end is not written, the drop sends requests, and waits for their replies.
/// It deletes the value, so that another caller runs the work. If the work must not run again, the drop writes the
/// record of the start again instead. Callers that wait watch the value, so they ask again in both cases.
struct Begun<'a> {
    once: &'a Once,
    /// The record of the start.
    start: Record,
    /// When the work began, by the clock of this client.
    began: MonotonicTime,
    /// `None` once the lock is released.
    guard: Option<MutexGuard>,
    may_run_again: bool,
}

impl Begun<'_> {
    /// Writes the record of the finished work, and releases the lock.
    fn end(mut self, result: &[u8]) -> Result<(), Error> {
        let longest = self.once.lock.client.longest_claimed_value();
        if result.len() > longest {
            let message = format!(
                "a result of {} bytes: longest result {longest} bytes",
                result.len()
            );
            return Err(Error::new(ErrorKind::TooLarge, message).with_key(self.once.key()));
        }
        let ran_for = self.once.lock.client.now().since(self.began);
        let ran_for = u64::try_from(ran_for.as_micros()).unwrap_or(0);
        let record = Record {
            ended: Some(self.start.started + ran_for),
            result: result.to_vec(),
            ..self.start.clone()
        };
        self.write(self.last_token(), Some(&record))?;
        self.guard.take().map_or(Ok(()), MutexGuard::finish)
    }

    /// The token under which the run ends. It is greater than that of the start, so Redis refuses a late record of the
    /// start. The token of the next holder is not smaller.
    fn last_token(&self) -> u64 {
        self.start.token + 1
    }

    fn guard(&self) -> &MutexGuard {
        self.guard.as_ref().expect("the guard is taken at the end")
    }

    /// Writes the record, or deletes the value if there is none: see [`FencedValue::change_under`].
    fn write(&self, token: u64, record: Option<&Record>) -> Result<(), Error> {
        let bytes = record.map(Record::encode);
        let value = self.once.value();
        value.change_under(self.guard(), token, bytes.as_deref())
    }
}

impl Drop for Begun<'_> {
    fn drop(&mut self) {
        let Some(guard) = self.guard.take_if(|guard| !guard.is_lost()) else {
            return;
        };
        let value = self.once.value();
        if !self.may_run_again {
            // The callers that wait watch the record of the start, so a write of the same record after the release
            // makes them ask again.
            if let Ok(Released::Confirmed) = guard.unlock() {
                let _ = value.write(self.start.token, self.start.encode());
            }
        } else if self.once.at_most_once {
            // A start that stays in Redis would interrupt the next callers, so the deletion is repeated.
            self.guard = Some(guard);
            let _ = self.write(self.last_token(), None);
        } else {
            // If Redis is away, the waiters run the work when the ttl of the lock has ended.
            let _ = value.delete(self.last_token());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(ended: Option<u64>, result: &[u8]) -> Record {
        Record {
            token: 1_795_263_780_943_818 << 10,
            holder: HolderId::of_text("host/1/a"),
            started: 1_795_263_780_943_818,
            ended,
            result: result.to_vec(),
        }
    }

    #[test]
    fn records_are_read_as_they_were_written() {
        let ends = [None, Some(1_795_263_780_943_900)];
        for (ended, result) in ends.into_iter().zip([&b""[..], b"a\nb\0\xff"]) {
            let record = record(ended, result);
            assert_eq!(Record::decode(&record.encode()).unwrap(), record);
        }
    }

    /// Clients of other versions read this form. A newer form needs a new first word.
    #[test]
    fn the_form_of_a_record_stays() {
        let done = record(Some(1_795_263_780_943_900), b"42 mails");
        let text =
            "once1 done 1838350111686469632 1795263780943818 1795263780943900 host/1/a\n42 mails";
        assert_eq!(String::from_utf8(done.encode()).unwrap(), text);
    }

    #[test]
    fn other_values_are_no_records() {
        for text in [
            "",
            "17",
            "once1 done 1 2 3 host/1/a",
            "once2 done 1 2 3 host/1/a\n",
            "once1 done 1 2 - host/1/a\n",
            "once1 started 1 2 3 host/1/a\n",
            "once1 done +1 2 3 host/1/a\n",
            "once1 done 1 2 3 host/1/a b\n",
            "once1 lost 1 2 3 host/1/a\n",
            "\n",
        ] {
            let error = Record::decode(text.as_bytes()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Protocol, "{text:?}");
        }
    }
}
