//! Leader election. The leader holds the lock of a name, and writes its value to the fenced value of the same name.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam_channel::Receiver;

use crate::acquire::{Campaign, LeaderInfo, LeaderState, ObserverId, Until};
use crate::client::Client;
use crate::command::{Command, Look, Reply};
use crate::config::key::Key;
use crate::lease::Ticket;
use crate::locks::fenced::FencedValue;
use crate::locks::guard::Guard;
use crate::locks::lock::{ClosureGuard, Lock, Ttl, run_under};
use crate::locks::mutex::{Mutex, MutexGuard};
use crate::report::error::{Error, ErrorKind};
use crate::report::released::Released;

/// An election of one leader among the processes that campaign under the same name. From [`Client::election`].
///
/// A candidate [campaigns](Self::campaign) with a value, its address for example, and waits until it leads. Any process
/// can ask for the [leader](Self::leader), or [observe](Self::observe) the election.
///
/// A leader holds the [`Mutex`] with this name for its term. The client renews the term, and the leader learns of its
/// loss in the same ways as the holder of any lock. The leader's value is the [`FencedValue`] of the same name, written
/// under the token of the term. So a term has the properties of a mutex:
///
/// - Candidates lead in the order in which they began to wait.
/// - If the leader's process ends, the next candidate leads when the ttl ends.
/// - **Two leaders can overlap for a short time** if a process stops for longer than the ttl, or if Redis loses data.
///   Pass the [fencing token](MutexGuard::fencing_token) with each write of the leader.
///
/// Do not lock a `Mutex` with the name of an election: its holder keeps candidates out, but observers see no leader.
///
/// | what happens | the leader | observers |
/// |---|---|---|
/// | it [resigns](Leader::resign), or is dropped | ends its term | `Vacant`, unless a candidate waits: then the next leader |
/// | its process ends, or is cut off from Redis | its term ends at the end of its validity | the same, when the ttl ends |
/// | it hands its term over ([`Leader::into_ticket`]) | ends its term | the next leader, whose value is `None` until it has proclaimed one. Never `Vacant` |
/// | Redis cannot be reached | leads until the end of its validity | `Unknown` after the validity of a ttl, then the state again |
/// | Redis loses its data, or a replica without the term takes over | loses its term within milliseconds as a rule | `Vacant`, or the next leader. A state older than a reported one counts as no answer |
/// | the client is shut down | loses its term; Redis keeps it until the leader is dropped, or until the ttl ends | the channel is disconnected |
///
/// On a [quorum](Client::quorum), and beside [another library](crate::Builder::compatible_with), every call fails with
/// [`Unsupported`](ErrorKind::Unsupported), without a request.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// use leasehold::LeaderState;
///
/// let election = client.election("scheduler");
/// let mut states = election.observe()?;
/// assert_eq!(states.next(), Some(LeaderState::Vacant));
///
/// let term = election.campaign("10.0.0.7:80")?;
/// let Some(LeaderState::Leader(leader)) = states.next() else { panic!() };
/// assert_eq!(leader.value(), Some(&b"10.0.0.7:80"[..]));
/// term.check()?; // between two pieces of the leader's work
/// term.resign()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone)]
#[must_use = "an election does nothing until it is used"]
pub struct Election {
    lock: Lock,
}

impl Mutex {
    /// An [`Election`] with this key and these settings. ([`Client::election`] returns one with the usual settings.)
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// use std::time::Duration;
    ///
    /// let election = client.mutex("k").max_hold(Duration::from_secs(3600)).election();
    /// let term = election.campaign("a")?; // for an hour at most
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn election(self) -> Election {
        Election { lock: self.lock }
    }
}

impl Election {
    pub(crate) fn new(client: Client, key: &str) -> Self {
        Mutex::new(client, key).election()
    }

    /// Sets the ttl of a term, as [`Mutex::ttl`] does. The client of the leader renews the term. After a crash of the
    /// leader, the election has no leader for at most this long. The ttl also decides when
    /// [observers](Self::observe) report [`LeaderState::Unknown`]. For the other settings of a lock, see
    /// [`Mutex::election`].
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let election = client.election("k").ttl(std::time::Duration::from_secs(5));
    /// let term = election.campaign("a")?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.lock.ttl = Ttl::Renewed(ttl);
        self
    }

    /// Cancels waiting campaigns when `cancel` gets a message or its senders are dropped, as [`Mutex::cancelled_by`]
    /// does.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// use leasehold::{ErrorKind, crossbeam_channel::bounded};
    ///
    /// let leader = client.election("k").campaign("a")?;
    /// let (stop, stopped) = bounded(0);
    /// let election = client.election("k").cancelled_by(stopped);
    /// let waiting = std::thread::spawn(move || election.campaign("b").map(drop));
    /// drop(stop);
    /// let error = waiting.join().unwrap().unwrap_err();
    /// assert_eq!(error.kind(), ErrorKind::Cancelled);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn cancelled_by(mut self, cancel: Receiver<()>) -> Self {
        self.lock.cancel = Some(cancel);
        self
    }

    /// The name, as it was given; empty if it is not a valid key.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// assert_eq!(client.election("scheduler").key(), "scheduler");
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn key(&self) -> &str {
        self.lock.name()
    }

    /// Waits until this candidate leads, and proclaims `value`. Candidates lead in the order in which they began to
    /// wait.
    ///
    /// If there is no leader, one request acquires the term and writes the value. Otherwise the candidate writes its
    /// value as soon as it leads. If the value cannot be written, the call ends the term and fails.
    ///
    /// A second call in the same process waits, too, until the first term has ended.
    ///
    /// # Errors
    /// The errors of [`Mutex::lock`] and of [`FencedValue::write`]. `LeaseLost` if the term was lost before its value
    /// was written; `TooLarge` if `value` is longer than [`max_reply_bytes`](crate::Builder::max_reply_bytes) less 1
    /// KiB; `Unsupported` on a quorum.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let term = client.election("scheduler").campaign("10.0.0.7:80")?;
    /// println!("leads, with token {}", term.fencing_token());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn campaign(&self, value: impl AsRef<[u8]>) -> Result<Leader, Error> {
        let leader = self.campaign_until(value.as_ref(), Until::Forever)?;
        Ok(leader.expect("a wait without a deadline ends with a leader or an error"))
    }

    /// Leads if there is no leader now, and proclaims `value`. Otherwise returns `Ok(None)`.
    ///
    /// # Errors
    /// The errors of [`campaign`](Self::campaign) except `Cancelled`. If Redis is away, the call fails after one
    /// attempt.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let election = client.election("k");
    /// let term = election.try_campaign("a")?.unwrap();
    /// assert!(election.try_campaign("b")?.is_none());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_campaign(&self, value: impl AsRef<[u8]>) -> Result<Option<Leader>, Error> {
        self.campaign_until(value.as_ref(), Until::Now)
    }

    /// Waits for the lead for at most `timeout`. Returns `Ok(None)` if others led until then.
    ///
    /// # Errors
    /// The errors of [`campaign`](Self::campaign). If Redis is away, the client tries again until `timeout` has passed.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// use std::time::Duration;
    ///
    /// let term = client.election("k").try_campaign_for(Duration::from_millis(250), "a")?;
    /// assert!(term.is_some());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_campaign_for(
        &self,
        timeout: Duration,
        value: impl AsRef<[u8]>,
    ) -> Result<Option<Leader>, Error> {
        let end = self.lock.client.now().after(timeout);
        self.campaign_until(value.as_ref(), Until::At(end))
    }

    /// Waits until `deadline`, and otherwise does the same as [`try_campaign_for`](Self::try_campaign_for).
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// use std::time::{Duration, Instant};
    ///
    /// let deadline = Instant::now() + Duration::from_millis(250);
    /// let term = client.election("k").try_campaign_until(deadline, "a")?;
    /// assert!(term.is_some());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn try_campaign_until(
        &self,
        deadline: Instant,
        value: impl AsRef<[u8]>,
    ) -> Result<Option<Leader>, Error> {
        self.try_campaign_for(deadline.saturating_duration_since(Instant::now()), value)
    }

    /// Waits until this candidate leads, runs `work`, and resigns. The same as [`campaign`](Self::campaign) and
    /// [`Leader::run`].
    ///
    /// # Errors
    /// The errors of [`campaign`](Self::campaign), and of [`Leader::run`].
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let done = client.election("k").run("10.0.0.7:80", |leader| {
    ///     println!("leads, with token {}", leader.fencing_token());
    ///     17
    /// })?;
    /// assert_eq!(done, 17);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn run<T>(
        &self,
        value: impl AsRef<[u8]>,
        work: impl FnOnce(&Leader) -> T,
    ) -> Result<T, Error> {
        self.campaign(value)?.run(work)
    }

    /// Takes over the term in a ticket from [`Leader::into_ticket`], and proclaims `value`. Other candidates cannot
    /// lead in between.
    ///
    /// The term keeps the settings of its first leader, such as the ttl.
    ///
    /// # Errors
    /// The errors of [`Client::adopt`]; `InvalidTicket` also if the ticket belongs to another name; the errors of
    /// [`campaign`](Self::campaign) that concern the value.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let election = client.election("scheduler");
    /// let ticket = election.campaign("version 1")?.into_ticket()?; // send it to the next process
    /// let term = election.adopt(&ticket, "version 2")?;
    /// assert_eq!(election.leader()?.unwrap().value(), Some(&b"version 2"[..]));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn adopt(&self, ticket: &str, value: impl AsRef<[u8]>) -> Result<Leader, Error> {
        let value = value.as_ref();
        self.check(value)?;
        let key = self.lock.key.clone()?;
        let read = Ticket::read(ticket, self.lock.client.config())?;
        if read.key.in_redis() != key.in_redis() {
            let message = format!("the ticket is that of {:?}", read.key.name());
            return Err(Error::new(ErrorKind::InvalidTicket, message).with_key(key.name()));
        }
        let guard = self.lock.client.adopt(ticket)?;
        Leader {
            guard,
            value: self.value(),
        }
        .proclaimed(value)
    }

    /// The leader now, according to Redis; `None` if there is none. Sends one request. The result may be out of date
    /// when you read it: [`observe`](Self::observe) reports changes.
    ///
    /// # Errors
    /// The errors of [`Mutex::inspect`] and [`FencedValue::read`]; `Unsupported` on a quorum.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// assert!(client.election("scheduler").leader()?.is_none());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn leader(&self) -> Result<Option<LeaderInfo>, Error> {
        self.check_store()?;
        let (key, value) = (self.lock.key.clone()?, self.value_key()?);
        match self.lock.client.ask(Command::Look(Look { key, value }))? {
            Reply::LockAndValue(found) => Ok(LeaderInfo::new(*found)),
            other => unreachable!("{other:?} in reply to a look"),
        }
    }

    /// Observes the election: returns the channel of its states. The first state comes from a read that begins after
    /// the observer was added, or is [`LeaderState::Unknown`] if Redis does not answer this read. Each later state is a
    /// change. This call does not wait. A thread of the client sends the requests.
    ///
    /// A slow observer may skip states, but never the newest: its channel has room for one state, and a newer state
    /// replaces it. The [fencing tokens](LeaderInfo::fencing_token) of the leaders that it reports never fall.
    ///
    /// A client can have thousands of observers: they share one thread, and the observers of one election share their
    /// requests. Observers that are added while a read is under way share the next one. Redis reports changes, so
    /// observers learn of them within milliseconds. If an ACL or a proxy refuses `CLIENT TRACKING`, the client asks
    /// every third of the [ttl](Self::ttl) instead. In both cases, an election without changes costs at most three
    /// requests for each ttl. If its observers have different ttls, the shortest one counts for all.
    ///
    /// After the last observer of an election is dropped, Redis keeps its two keys in the tracking table until they
    /// change or the client's connection ends. `tracking-table-max-keys` bounds this table.
    ///
    /// # Errors
    /// `InvalidKey`, `InvalidConfig`, `Shutdown`, `Forked`; `Unavailable` if the thread cannot be started;
    /// `Unsupported` on a quorum. The observer reports later errors of Redis as [`LeaderState::Unknown`].
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// use leasehold::LeaderState;
    /// use leasehold::crossbeam_channel::{after, select};
    /// use std::time::Duration;
    ///
    /// let states = client.election("scheduler").observe()?;
    /// let term = client.election("scheduler").campaign("10.0.0.7:80")?;
    /// let leader = loop {
    ///     select! {
    ///         recv(states) -> state => match state.expect("the client lives") {
    ///             LeaderState::Leader(leader) => break leader,
    ///             LeaderState::Vacant | LeaderState::Unknown => println!("no leader is known"),
    ///         },
    ///         recv(after(Duration::from_secs(60))) -> _ => panic!("no leader for a minute"),
    ///     }
    /// };
    /// assert_eq!(leader.fencing_token(), term.fencing_token());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn observe(&self) -> Result<Observer, Error> {
        self.check_store()?;
        let (client, request) = self.lock.prepare()?;
        let value = self.value_key()?;
        let (id, states) = client
            .observe(&request.key, &value, request.options.ttl)
            .map_err(|error| error.with_key(self.key()))?;
        Ok(Observer {
            id,
            states,
            client: self.lock.client.clone(),
        })
    }

    fn campaign_until(&self, value: &[u8], until: Until) -> Result<Option<Leader>, Error> {
        self.check(value)?;
        let (client, request) = self.lock.prepare()?;
        let (value_key, term) = (self.value_key()?, Arc::from(value));
        let campaign = client
            .acquirer
            .campaign(&request, &value_key, term, until)?;
        let Some(Campaign {
            lease,
            is_value_written,
        }) = campaign
        else {
            return Ok(None);
        };
        let guard = MutexGuard::new(Guard::new(lease, self.lock.client.clone()));
        let leader = Leader {
            guard,
            value: self.value(),
        };
        match is_value_written {
            true => Ok(Some(leader)),
            false => leader.proclaimed(value).map(Some),
        }
    }

    fn value(&self) -> FencedValue {
        FencedValue::new(self.lock.client.clone(), self.key())
    }

    fn value_key(&self) -> Result<Key, Error> {
        self.value().key
    }

    fn check_store(&self) -> Result<(), Error> {
        self.lock.check_claims(
            "hold a mutex, and write the leader's address with its fencing token into a database that compares tokens",
        )
    }

    fn check(&self, value: &[u8]) -> Result<(), Error> {
        self.check_store()?;
        check_length(value, &self.lock.client, self.key())
    }
}

/// Refuses a value that is too long for clients with these settings to read.
fn check_length(value: &[u8], client: &Client, key: &str) -> Result<(), Error> {
    let longest = client.longest_claimed_value();
    if value.len() <= longest {
        return Ok(());
    }
    let message = format!(
        "a value of {} bytes: longest value {longest} bytes",
        value.len()
    );
    Err(Error::new(ErrorKind::TooLarge, message).with_key(key))
}

impl fmt::Debug for Election {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut output = f.debug_struct("Election");
        self.lock.debug_fields(&mut output);
        output.finish()
    }
}

/// The term of a leader. Its drop ends the term: it writes the release to Redis, and does not wait for the reply. From
/// [`Election::campaign`].
///
/// A `Leader` dereferences to the [`MutexGuard`] of its lock: [`check`](MutexGuard::check),
/// [`lost_signal`](MutexGuard::lost_signal), [`on_lost`](MutexGuard::on_lost),
/// [`fencing_token`](MutexGuard::fencing_token) and [`transaction`](MutexGuard::transaction), for example.
///
/// ```
/// # let client = leasehold::Client::memory()?;
/// let term = client.election("scheduler").campaign("10.0.0.7:80")?;
/// term.on_lost(|reason| eprintln!("does not lead any more: {reason}"));
/// while !term.is_lost() {
///     println!("a piece of work, with token {}", term.fencing_token());
/// #   break;
/// }
/// # Ok::<(), leasehold::Error>(())
/// ```
#[must_use = "the term ends as soon as its leader is dropped"]
pub struct Leader {
    guard: MutexGuard,
    value: FencedValue,
}

impl Leader {
    /// Replaces the value that observers see, under the token of this term. In an outage, repeats the write for
    /// [`outage_timeout`](crate::Builder::outage_timeout).
    ///
    /// # Errors
    /// `LeaseLost` if the term was lost, or if a later leader has proclaimed a value under its greater token. After
    /// `Timeout` or `Unavailable`, Redis may still write the value, even after a later value of this term: call this
    /// again. `TooLarge` as for [`Election::campaign`]; the errors of [`FencedValue::write`].
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let election = client.election("scheduler");
    /// let term = election.campaign("10.0.0.7:80")?;
    /// term.proclaim("10.0.0.7:8080")?;
    /// assert_eq!(election.leader()?.unwrap().value(), Some(&b"10.0.0.7:8080"[..]));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn proclaim(&self, value: impl AsRef<[u8]>) -> Result<(), Error> {
        let value = value.as_ref();
        check_length(value, &self.value.client, self.key())?;
        let token = self.fencing_token();
        self.value.change_under(&self.guard, token, Some(value))
    }

    /// Proclaims the first value, and returns this leader. An error ends the term.
    fn proclaimed(self, value: &[u8]) -> Result<Self, Error> {
        self.proclaim(value)?;
        Ok(self)
    }

    /// Ends the term, and waits for the reply, as [`MutexGuard::unlock`] does. The next candidate then leads.
    ///
    /// # Errors
    /// `LeaseLost` if the term had been lost.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let election = client.election("scheduler");
    /// election.campaign("a")?.resign()?;
    /// assert!(election.leader()?.is_none());
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn resign(self) -> Result<Released, Error> {
        self.guard.unlock()
    }

    /// Runs `work`, and then resigns. The term ends only after `work` has returned or panicked, or when its validity
    /// ends, even if the client is shut down in the meantime.
    ///
    /// # Errors
    /// The errors of [`Mutex::with`]: `LeaseLost` if the term was lost before `work` returned.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let term = client.election("scheduler").campaign("a")?;
    /// let done = term.run(|leader| leader.proclaim("b").map(|()| 17))??;
    /// assert_eq!(done, 17);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn run<T>(self, work: impl FnOnce(&Self) -> T) -> Result<T, Error> {
        run_under(self, work)
    }

    /// Ends this guard but not the term, and returns a ticket. With the ticket, another process takes over the term:
    /// [`Election::adopt`]. Otherwise does the same as [`MutexGuard::into_ticket`].
    ///
    /// Observers see this leader until the adoption. If no process adopts the term, it ends with its ttl.
    ///
    /// # Errors
    /// `LeaseLost` if the term had been lost.
    ///
    /// ```
    /// # let client = leasehold::Client::memory()?;
    /// let election = client.election("scheduler");
    /// let ticket = election.campaign("a")?.into_ticket()?;
    /// let next = election.adopt(&ticket, "b")?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn into_ticket(self) -> Result<String, Error> {
        self.guard.into_ticket()
    }
}

impl Deref for Leader {
    type Target = MutexGuard;

    fn deref(&self) -> &MutexGuard {
        &self.guard
    }
}

impl ClosureGuard for Leader {
    fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        self.guard.run(work)
    }

    fn finish(self) -> Result<(), Error> {
        self.guard.finish()
    }
}

impl fmt::Debug for Leader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leader")
            .field("guard", &self.guard)
            .finish()
    }
}

/// Receives the states of an election, as they change. From [`Election::observe`]. Its drop sends no request.
///
/// An `Observer` is an iterator that waits for the next state. It also dereferences to a [`Receiver`], for `select!`,
/// `recv_timeout` and `try_recv`. The channel is disconnected, and the iterator ends, only when the client is shut
/// down. An observer keeps its client alive. In a forked child, the iterator ends at once.
///
/// ```
/// # let client = leasehold::Client::memory()?;
/// use leasehold::LeaderState;
/// use std::time::Duration;
///
/// let states = client.election("scheduler").observe()?;
/// assert_eq!(states.recv_timeout(Duration::from_secs(60)), Ok(LeaderState::Vacant));
/// # let shut_down = client.clone();
/// # std::thread::spawn(move || shut_down.shutdown(Duration::from_secs(1)));
/// for state in states {
///     println!("{state:?}");
/// }
/// # Ok::<(), leasehold::Error>(())
/// ```
#[must_use = "an observer ends as soon as it is dropped"]
pub struct Observer {
    id: ObserverId,
    states: Receiver<LeaderState>,
    client: Client,
}

impl Deref for Observer {
    type Target = Receiver<LeaderState>;

    fn deref(&self) -> &Receiver<LeaderState> {
        &self.states
    }
}

impl Iterator for Observer {
    type Item = LeaderState;

    fn next(&mut self) -> Option<LeaderState> {
        self.client.live().ok()?;
        self.states.recv().ok()
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        match self.client.live() {
            Ok(client) => client.acquirer.leaders.leave(self.id),
            // In a forked child, the channel must not be dropped: at the fork, a thread of the parent may have held one
            // of its mutexes.
            Err(_) => std::mem::forget(self.states.clone()),
        }
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer").finish_non_exhaustive()
    }
}
