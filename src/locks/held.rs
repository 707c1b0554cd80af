//! Descriptions of locks, as plain data: the holders of a key according to Redis, and the locks that this client holds.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::command::{Foreign, FoundShare, Mode, Reply, value};
use crate::util::id::{HolderId, LeaseId};

/// The holders in the reply to an inspection: at most 100, those whose leases end first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Holders {
    pub listed: Vec<HolderInfo>,
    /// The number of readers or permits; 1 for an exclusive holder, and 0 for a free key.
    pub taken: u32,
    /// The number of waiting clients.
    pub queued: usize,
}

impl Holders {
    pub fn new(reply: Reply) -> Self {
        match reply {
            Reply::Found { value, expires_in } => Self {
                taken: 1,
                queued: value.queued,
                listed: vec![HolderInfo {
                    kind: HolderKind::Exclusive,
                    holder: value.holder,
                    lease: Some(value.lease),
                    token: value.token,
                    expires_in,
                }],
            },
            Reply::Shared(found) => Self {
                taken: found.taken,
                queued: found.queued,
                listed: found
                    .shares
                    .into_iter()
                    .map(HolderInfo::from_share)
                    .collect(),
            },
            Reply::Foreign(found) => Self {
                taken: 1,
                queued: 0,
                listed: vec![HolderInfo::from_foreign(found)],
            },
            _ => Self::default(),
        }
    }

    /// The kind of all holders; `None` if there are none.
    pub fn kind(&self) -> Option<HolderKind> {
        self.listed.first().map(HolderInfo::kind)
    }
}

/// How a lease holds its key.
///
/// ```
/// # let client = leasehold::Client::memory()?;
/// use leasehold::HolderKind;
///
/// let permit = client.semaphore("gpu", 8).weight(3).acquire()?;
/// for holder in client.mutex("gpu").inspect()?.unwrap().holders() {
///     match holder.kind() {
///         HolderKind::Exclusive => println!("{} has the lock alone", holder.holder()),
///         HolderKind::Reader => println!("{} reads", holder.holder()),
///         HolderKind::Permits { weight, limit } => assert_eq!((weight, limit), (3, 8)),
///         _ => {}
///     }
/// }
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum HolderKind {
    /// The holder of a mutex, or the writer of a read-write lock.
    Exclusive,
    /// A reader of a read-write lock.
    Reader,
    /// The holder of `weight` permits of a semaphore, which asked for them with this limit.
    Permits {
        /// The number of permits.
        weight: u32,
        /// The limit of the semaphore that the holder used.
        limit: u32,
    },
    /// Another library, whose lock the client respects:
    /// [`Builder::compatible_with`](crate::Builder::compatible_with).
    OtherLibrary {
        /// The type of the key as `TYPE` names it: `string` or `hash`, for example. `other` for a type of a module.
        redis_type: &'static str,
    },
}

/// One holder of a key according to Redis: a lease of a client. From [`LockInfo::holders`] and the other inspections.
///
/// ```
/// # let client = leasehold::Client::memory()?;
/// let guard = client.rw_lock("catalog").read()?;
/// for reader in client.rw_lock("catalog").inspect()?.holders() {
///     println!("{:?} {} until {:?} from now", reader.kind(), reader.holder(), reader.expires_in());
///     assert_eq!(reader.id(), guard.id());
///     assert_eq!(reader.fencing_token(), None, "only exclusive holders show it");
///     assert_eq!(reader.granted_at(), None, "only exclusive holders show it");
/// }
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HolderInfo {
    kind: HolderKind,
    holder: HolderId,
    /// `None` for another library.
    lease: Option<LeaseId>,
    token: Option<u64>,
    expires_in: Option<Duration>,
}

/// The examples of [`HolderInfo`] and [`HolderKind`] use every method.
impl HolderInfo {
    fn from_share(share: FoundShare) -> Self {
        Self {
            kind: match share.mode {
                Mode::Exclusive => HolderKind::Exclusive,
                Mode::Read => HolderKind::Reader,
                Mode::Permits { weight, limit } => HolderKind::Permits { weight, limit },
            },
            holder: share.holder,
            lease: Some(share.lease),
            token: None,
            expires_in: Some(share.expires_in),
        }
    }

    fn from_foreign(found: Foreign) -> Self {
        let redis_type = found.redis_type;
        Self {
            kind: HolderKind::OtherLibrary { redis_type },
            holder: HolderId::of_text(&format!("another-library/{redis_type}")),
            lease: None,
            token: None,
            expires_in: found.expires_in,
        }
    }

    /// Whether this is a reader, a holder of permits, an exclusive holder, or another library.
    pub fn kind(&self) -> HolderKind {
        self.kind
    }

    /// The client: `host/pid/random`. For another library: `another-library/` and the type of the key.
    pub fn holder(&self) -> &HolderId {
        &self.holder
    }

    /// The lease id in Redis: 32 hexadecimal digits that identify the grant. It is the
    /// [`RwLockReadGuard::id`](crate::RwLockReadGuard::id) of a reader and the
    /// [`SemaphorePermit::id`](crate::SemaphorePermit::id) of permits. Keep that of an exclusive holder out of logs: it
    /// is enough to make a ticket for [`Client::adopt`](crate::Client::adopt). `Debug` shows its first eight digits.
    /// Empty for another library, whose value in Redis is its secret.
    pub fn id(&self) -> String {
        self.lease
            .map_or_else(String::new, |lease| lease.to_string())
    }

    /// The fencing token of the grant to an exclusive holder: see [`LockInfo::fencing_token`]. `None` for others.
    pub fn fencing_token(&self) -> Option<u64> {
        self.token
    }

    /// When an exclusive holder was granted the lock, by the clock of Redis. `None` if Redis does not store this time:
    /// for readers and permits, and if plain commands acquired the lock, as they do for most free locks.
    pub fn granted_at(&self) -> Option<SystemTime> {
        let micros = value::micros_of(self.token?);
        Some(UNIX_EPOCH + Duration::from_micros(micros))
    }

    /// The time until the lease ends if it is not renewed. `None` if another program has removed the ttl of the key;
    /// the next request for the lock sets a ttl again. Also `None` for a lock of another library that has no ttl.
    pub fn expires_in(&self) -> Option<Duration> {
        self.expires_in
    }

    /// `None` for another library.
    pub(crate) fn lease(&self) -> Option<LeaseId> {
        self.lease
    }

    /// The mode and the holder that a forced release of a share names; `None` for an exclusive holder.
    pub(crate) fn share(&self) -> Option<(Mode, HolderId)> {
        let mode = match self.kind {
            HolderKind::Exclusive | HolderKind::OtherLibrary { .. } => return None,
            HolderKind::Reader => Mode::Read,
            HolderKind::Permits { weight, limit } => Mode::Permits { weight, limit },
        };
        Some((mode, self.holder.clone()))
    }
}

/// The holder of a lock according to Redis, from [`Mutex::inspect`](crate::Mutex::inspect). If leases share the key,
/// there are several holders, and the methods about one holder describe the one whose lease ends first.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let guard = client.mutex("k").lock()?;
/// let found = client.mutex("k").inspect()?.unwrap();
/// println!("{} has had it for a while: {found:?}", found.holder());
/// assert_eq!(found.lease_id().len(), 32);
/// assert_eq!(found.holder(), client.holder_id());
/// if let Some(token) = found.fencing_token() {
///     assert_eq!(token, guard.fencing_token());
/// }
/// assert!(found.expires_in() <= Some(std::time::Duration::from_secs(30)));
/// assert_eq!((found.holders().len(), found.taken(), found.clients_waiting()), (1, 1, 0));
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct LockInfo {
    first: HolderInfo,
    all: Holders,
}

/// The example of [`LockInfo`] uses every method.
impl LockInfo {
    /// `None` if the key has no holder.
    pub(crate) fn new(all: Holders) -> Option<Self> {
        let first = all.listed.first()?.clone();
        Some(Self { first, all })
    }

    /// The client that holds the lock: `host/pid/random`. If another library holds it: `another-library/` and the type of
    /// its key, and [`HolderInfo::kind`] tells the two cases apart.
    pub fn holder(&self) -> &HolderId {
        self.first.holder()
    }

    /// The lease id in Redis: 32 hexadecimal digits that identify the grant. Keep it out of logs: it is enough to make
    /// a ticket for [`Client::adopt`](crate::Client::adopt). `Debug` shows its first eight digits. Empty if another
    /// library holds the lock.
    pub fn lease_id(&self) -> String {
        self.first.id()
    }

    /// The fencing token of the grant. The token of the guard is greater by the number of hand-offs within its client
    /// since the grant: Redis does not know of hand-offs.
    ///
    /// `None` if the lock was acquired by plain commands instead of a script: then only its holder knows the token.
    /// Also `None` if leases share the key.
    pub fn fencing_token(&self) -> Option<u64> {
        self.first.fencing_token()
    }

    /// The time until the key expires if it is not renewed. `None` if another program has removed the ttl; the next
    /// request for the lock sets a ttl again. Also `None` for a lock of another library that has no ttl.
    pub fn expires_in(&self) -> Option<Duration> {
        self.first.expires_in()
    }

    /// All holders, at most 100: one for a mutex; the readers or the holders of permits if leases share the key.
    pub fn holders(&self) -> &[HolderInfo] {
        &self.all.listed
    }

    /// The number of readers or of permits, which may be more than the listed holders have. 1 for an exclusive holder.
    pub fn taken(&self) -> u32 {
        self.all.taken
    }

    /// The number of clients in the queue of the lock. Each client may have several waiting threads.
    pub fn clients_waiting(&self) -> usize {
        self.all.queued
    }
}

/// A lock that this client holds, from [`Client::held_locks`](crate::Client::held_locks).
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let guard = client.mutex("k").lock()?;
/// for held in client.held_locks() {
///     println!("{} since {:?}", held.key(), held.age());
///     assert_eq!(held.fencing_token(), guard.fencing_token());
///     assert!(held.remaining() > held.age());
/// }
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeldLock {
    pub(crate) key: String,
    pub(crate) token: u64,
    pub(crate) age: Duration,
    pub(crate) remaining: Duration,
}

/// The example of [`HeldLock`] uses every method.
impl HeldLock {
    /// The name of the lock.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The fencing token of the lock's guard.
    pub fn fencing_token(&self) -> u64 {
        self.token
    }

    /// For how long this client has held the lock. A hand-off between its threads does not restart this time.
    pub fn age(&self) -> Duration {
        self.age
    }

    /// The rest of the validity: for how long the lock is held if all further renewals fail.
    pub fn remaining(&self) -> Duration {
        self.remaining
    }
}
