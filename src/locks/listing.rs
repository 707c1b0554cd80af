//! The list of the locks in Redis, which is read in pages: a scan finds keys, and inspections read them.

use std::collections::{HashSet, VecDeque};

use crate::client::Client;
use crate::command::{Command, Inspect, Request};
use crate::config::key::Key;
use crate::locks::held::{Holders, LockInfo};
use crate::report::error::{Error, ErrorKind};
use crate::store::{Scan, ServerId};

/// An iterator over the locks in Redis, from [`Client::locks`]. It reads them in pages, as the caller asks for more.
///
/// After an error, the list ends.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let guards = ["invoice:1", "invoice:2"].map(|key| client.mutex(key).lock().unwrap());
/// let first_thousand = client.locks("invoice:").take(1_000);
/// assert_eq!(first_thousand.collect::<Result<Vec<_>, _>>()?.len(), 2);
/// # Ok::<(), leasehold::Error>(())
/// ```
#[must_use = "the list reads nothing until it is asked for its next lock"]
pub struct FoundLocks {
    client: Client,
    /// The text with which the listed keys begin in Redis.
    start: String,
    /// The servers that are still to be scanned. `None` before the first request.
    servers: Option<VecDeque<ServerId>>,
    /// The cursor at which the scan of the first server continues.
    cursor: u64,
    page: VecDeque<FoundLock>,
    has_failed: bool,
}

/// A lock in Redis, from [`Client::locks`].
///
/// ```
/// # let client = leasehold::Client::memory()?;
/// use leasehold::HolderKind;
///
/// let permit = client.semaphore("gpu", 8).weight(3).acquire()?;
/// for found in client.locks("") {
///     let found = found?;
///     assert_eq!((found.key(), found.info().taken()), ("gpu", 3));
///     for holder in found.info().holders() {
///         assert_eq!(holder.kind(), HolderKind::Permits { weight: 3, limit: 8 });
///     }
/// }
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FoundLock {
    key: String,
    info: LockInfo,
}

/// The example of [`FoundLock`] uses every method.
impl FoundLock {
    /// The name of the lock.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// The holders of the lock, and the number of waiting clients.
    pub fn info(&self) -> &LockInfo {
        &self.info
    }
}

impl FoundLocks {
    pub(crate) fn new(client: Client, start: &str) -> Self {
        Self {
            start: [&client.config().prefix, start].concat(),
            client,
            servers: None,
            cursor: 0,
            page: VecDeque::new(),
            has_failed: false,
        }
    }

    /// Reads the next page. Returns false at the end of the list.
    fn read_page(&mut self) -> Result<bool, Error> {
        let handle = self.client.running()?;
        let store = &handle.backend.store;
        let servers = match &mut self.servers {
            Some(servers) => servers,
            None => self.servers.insert(store.servers_to_scan()?.into()),
        };
        let Some(server) = servers.front() else {
            return Ok(false);
        };
        let scan = Scan {
            start: self.start.clone(),
            cursor: self.cursor,
        };
        let found = store.scan(*server, &scan)?;
        self.cursor = found.next;
        if found.next == 0 {
            servers.pop_front();
        }
        let config = &handle.config;
        // Redis may return a key twice. Other keys of this library begin with a reserved character.
        let keys: HashSet<String> = found.keys.into_iter().collect();
        let keys = keys.iter().filter_map(|key| {
            let name = key.strip_prefix(&config.prefix)?;
            Key::new(&config.prefix, name, config.max_key_bytes).ok()
        });
        let deadline = handle.now().after(config.command_timeout);
        let inspect = |key| Request::new(Command::Inspect(Inspect { key }), deadline);
        let mut requests: Vec<Request> = keys.map(inspect).collect();
        store.execute(&mut requests);
        for request in requests {
            let key = request.command.key().map_or("", Key::name).to_owned();
            match request.into_outcome() {
                // `None` if the lock was released since the scan.
                Ok(reply) => {
                    let info = LockInfo::new(Holders::new(reply));
                    self.page.extend(info.map(|info| FoundLock { key, info }));
                }
                // A value of another program.
                Err(error) if error.kind() == ErrorKind::Protocol => {}
                Err(error) => return Err(error.with_key(&key)),
            }
        }
        Ok(true)
    }
}

impl Iterator for FoundLocks {
    type Item = Result<FoundLock, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(found) = self.page.pop_front() {
                return Some(Ok(found));
            }
            if self.has_failed {
                return None;
            }
            match self.read_page() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(error) => {
                    self.has_failed = true;
                    return Some(Err(error));
                }
            }
        }
    }
}

impl std::iter::FusedIterator for FoundLocks {}

impl std::fmt::Debug for FoundLocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FoundLocks")
            .field("start", &self.start)
            .finish_non_exhaustive()
    }
}
