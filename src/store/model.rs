//! The store of those models that are not about the lanes: carries out each command at once, on a
//! server in memory, and brings the news of grants to who stands in line there.

use std::collections::HashSet;
use std::sync::Arc;

use crate::clock::Moment;
use crate::error::Error;
use crate::id::LeaseId;
use crate::key::Key;
use crate::store::link::{Faults, Server as Memory};
use crate::store::{Command, Listener, Request, Standing, Store, Watched};
use crate::sync::model::step;
use crate::sync::{Condvar, Mutex};
use crate::thread::Crew;

/// The server that several clients of a model share.
#[derive(Clone)]
pub(crate) struct Server(Arc<Shared>);

struct Shared {
    memory: Arc<Memory>,
    news: Mutex<News>,
    changed: Condvar,
}

#[derive(Default)]
struct News {
    granted: Vec<(Key, LeaseId, u64)>,
    over: bool,
}

impl Server {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Shared {
            memory: Memory::new(Faults::default()),
            news: Mutex::default(),
            changed: Condvar::new(),
        }))
    }

    pub(crate) fn give(&self, key: &Key, lease: LeaseId, until: Moment) {
        self.0.memory.give(key, lease, until);
    }

    pub(crate) fn take_back(&self, key: &Key, lease: LeaseId) {
        self.0.memory.take_back(key, lease);
        self.spread();
    }

    pub(crate) fn holder(&self, key: &Key) -> Option<LeaseId> {
        self.0.memory.holder(key)
    }

    /// There will be no more news.
    pub(crate) fn end(&self) {
        self.0.news.lock().over = true;
        self.0.changed.notify_all();
    }

    fn spread(&self) {
        let granted = self.0.memory.told();
        if !granted.is_empty() {
            self.0.news.lock().granted.extend(granted);
            self.0.changed.notify_all();
        }
    }
}

/// One client's way to it.
pub(crate) struct Direct {
    server: Server,
    standing: Standing,
    /// The leases that it has asked for.
    asked: parking_lot::Mutex<HashSet<LeaseId>>,
}

impl Direct {
    pub(crate) fn new(server: &Server, standing: Standing) -> Self {
        Self {
            server: server.clone(),
            standing,
            asked: parking_lot::Mutex::default(),
        }
    }

    /// Brings `listener` its news until there will be no more.
    pub(crate) fn hear(&self, listener: &dyn Listener) {
        loop {
            let mut news = self.server.0.news.lock();
            let asked = self.asked.lock();
            let own = (news.granted.iter()).position(|(_, lease, _)| asked.contains(lease));
            drop(asked);
            match own {
                Some(own) => {
                    let (key, lease, token) = news.granted.swap_remove(own);
                    drop(news);
                    listener.granted(&key, lease, token);
                }
                None if news.over => return,
                None => self.server.0.changed.wait(&mut news),
            }
        }
    }
}

impl Store for Direct {
    fn execute(&self, requests: &mut [Request]) {
        for request in requests {
            if let Command::Acquire { lease, .. } = &request.command {
                self.asked.lock().insert(*lease);
            }
            step();
            request.outcome = Some(Ok(self.server.0.memory.serve(&request.command)));
            self.server.spread();
        }
        step();
    }

    fn post(&self, release: Command) {
        step();
        self.server.0.memory.serve(&release);
        self.server.spread();
    }

    fn listen(&self, _: &Crew, _: Arc<dyn Listener>) -> Result<(), Error> {
        Ok(())
    }

    fn standing(&self) -> Standing {
        self.standing
    }

    fn want_wakeups(&self) {}

    fn watch(&self, _: Vec<Watched>) -> bool {
        true
    }

    fn stop_listening(&self) {}
}
