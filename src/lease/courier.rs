//! The thread that runs user code nobody waits for: `on_lost` callbacks, events and what is observed.
//! Nothing of the library waits for it, and a panic in user code does not end it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::error::Error;
use crate::event::{EventLock, Events};
use crate::key::Key;
use crate::lease::Lease;
use crate::observe::{self, Observer};
use crate::thread::Crew;

type Errand = Box<dyn FnOnce() + Send>;

/// Hands errands to the courier's thread. Sending never blocks: what user code cannot keep up with
/// waits here.
pub(crate) struct Courier {
    errands: Sender<Message>,
    events: Option<Arc<dyn Events>>,
    when_lost: OnceLock<WhenLost>,
}

/// Called for each lease that is lost, once its signals are set. Quick; never user code.
type WhenLost = Box<dyn Fn(&Lease) + Send + Sync>;

enum Message {
    Run(Errand),
    Stop,
}

impl Courier {
    /// Starts the thread.
    pub(crate) fn start(crew: &Crew, events: Option<Arc<dyn Events>>) -> Result<Arc<Self>, Error> {
        let (errands, inbox) = unbounded();
        crew.spawn("leasehold-callbacks", move || deliver(&inbox))?;
        Ok(Arc::new(Self {
            errands,
            events,
            when_lost: OnceLock::new(),
        }))
    }

    /// One without its thread: a model has its errands run by what this returns.
    #[cfg(all(test, shuttle))]
    pub(crate) fn of_a_model() -> (Arc<Self>, impl Fn()) {
        let (errands, inbox) = unbounded();
        let courier = Self {
            errands,
            events: None,
            when_lost: OnceLock::new(),
        };
        let deliver = move || {
            while let Ok(Message::Run(errand)) = inbox.try_recv() {
                errand();
            }
        };
        (Arc::new(courier), deliver)
    }

    pub(crate) fn run(&self, errand: impl FnOnce() + Send + 'static) {
        // Fails only after the client has ended, and its callbacks with it.
        let _ = self.errands.send(Message::Run(Box::new(errand)));
    }

    /// Who of this client is to know when a lease was lost; set once.
    pub(crate) fn when_lost(&self, hook: impl Fn(&Lease) + Send + Sync + 'static) {
        let _ = self.when_lost.set(Box::new(hook));
    }

    pub(super) fn lost(&self, lease: &Lease) {
        if let Some(hook) = self.when_lost.get() {
            hook(lease);
        }
    }

    /// Tells of an event on the courier's thread; costs nothing when nobody listens.
    pub(crate) fn tell_later(&self, event: impl FnOnce(&dyn Events) + Send + 'static) {
        if let Some(events) = &self.events {
            let events = Arc::clone(events);
            self.run(move || event(&*events));
        }
    }

    /// Tells of what befell a lock, on the courier's thread: to who observes, and to who listens. Costs
    /// nothing when nobody does.
    pub(crate) fn report_later(
        &self,
        key: &Key,
        fencing_token: u64,
        event: impl Fn(&dyn Events, EventLock<'_>) + Send + 'static,
    ) {
        if !observe::IS_ON && self.events.is_none() {
            return;
        }
        let (key, events) = (key.clone(), self.events.clone());
        self.run(move || {
            let key = key.name();
            let lock = EventLock { key, fencing_token };
            if observe::IS_ON {
                event(&Observer, lock);
            }
            if let Some(events) = events {
                event(&*events, lock);
            }
        });
    }

    /// Tells what is observed, on the courier's thread; costs nothing when nothing is.
    pub(crate) fn observe_later(&self, tell: impl FnOnce() + Send + 'static) {
        if observe::IS_ON {
            self.run(tell);
        }
    }

    /// Whether anybody is told of anything: if not, nobody need know how long it took.
    pub(crate) fn is_heard(&self) -> bool {
        observe::IS_ON || self.events.is_some()
    }

    /// Tells of an event on this thread.
    pub(crate) fn tell(&self, event: impl FnOnce(&dyn Events)) {
        if let Some(events) = &self.events {
            let _ = catch_unwind(AssertUnwindSafe(|| event(&**events)));
        }
    }

    /// Ends the thread after what has been handed to it so far.
    pub(crate) fn stop(&self) {
        let _ = self.errands.send(Message::Stop);
    }
}

fn deliver(inbox: &Receiver<Message>) {
    while let Ok(Message::Run(errand)) = inbox.recv() {
        let _ = catch_unwind(AssertUnwindSafe(errand));
    }
}
