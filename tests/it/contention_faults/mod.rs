//! Faults while several clients wait for one lock. Each waiter gets the lock in the end, alone, and long before a ttl
//! ends.

mod connections;
pub mod crashes;
mod deadlines;
mod frozen;
mod lost_notifications;
mod memory;
mod outages;
mod relay;

use std::sync::Arc;
use std::thread;

use leasehold::{Client, Error, Mutex, Released};
use leasehold_testbed::{Reply, Server, eventually};

use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, Task, Witness, ask, builder, millis};

const KEY: &str = "k";

/// A client whose locks have a ttl longer than any test.
fn client(url: &str) -> Client {
    builder(url).ttl(LONG_TTL).build().unwrap()
}

/// A client that must not notice the faults. It has the ttl of [`client`], and time-outs that a busy machine does not
/// reach.
fn unhurried(url: &str) -> Client {
    steady(url).ttl(LONG_TTL).build().unwrap()
}

/// One of the server's connections to its clients.
struct Connection {
    id: String,
    name: String,
}

impl Connection {
    fn hears_notifications(&self) -> bool {
        self.name.starts_with("leasehold-notifications:")
    }
}

/// All connections, possibly with that of this request.
fn connections(server: &Server) -> Vec<Connection> {
    let list = ask(server, &["CLIENT", "LIST"]);
    let lines = list.as_text().expect("CLIENT LIST is text").lines();
    let one = |line: &str| {
        let field = |name| line.split(' ').find_map(|field| field.strip_prefix(name));
        Connection {
            id: field("id=").expect("every connection has an id").to_owned(),
            name: field("name=").unwrap_or_default().to_owned(),
        }
    };
    lines.map(one).collect()
}

/// Returns false if the connection has ended by itself.
fn kill(server: &Server, connection: &Connection) -> bool {
    ask(server, &["CLIENT", "KILL", "ID", &connection.id]) == Reply::Int(1)
}

/// Kills all notification connections and no others; returns their number.
fn kill_notifications(server: &Server) -> usize {
    let all = connections(server);
    let hearing = all
        .iter()
        .filter(|connection| connection.hears_notifications());
    hearing
        .filter(|connection| kill(server, connection))
        .count()
}

/// Fails if the lock was lost. A release without a reply is no loss.
#[track_caller]
fn assert_kept(unlocked: Result<Released, Error>) {
    unlocked.unwrap();
}

/// Threads that acquire the lock in turns. Each checks that no other thread holds the lock.
struct Turns {
    witness: Arc<Witness>,
    tasks: Vec<Task<()>>,
    expected: usize,
}

impl Turns {
    /// Starts one thread for each of `mutexes`; each holds the lock `turns` times for a moment.
    fn start(mutexes: impl IntoIterator<Item = Mutex>, turns: usize) -> Self {
        let witness = Arc::new(Witness::default());
        let tasks: Vec<Task<()>> = mutexes
            .into_iter()
            .map(|mutex| {
                let witness = Arc::clone(&witness);
                Task::start(move || {
                    for turn in 0..turns {
                        let guard = mutex.lock().unwrap();
                        let inside = witness.enter(&guard);
                        thread::sleep(millis(1));
                        drop(inside);
                        match turn % 2 {
                            0 => drop(guard),
                            _ => assert_kept(guard.unlock()),
                        }
                    }
                })
            })
            .collect();
        Self {
            expected: tasks.len() * turns,
            witness,
            tasks,
        }
    }

    /// `threads` threads of each client, which want one lock.
    fn of(clients: &[Client], threads: usize, turns: usize) -> Self {
        let one = |client: &Client| client.mutex(KEY);
        let mutexes = clients
            .iter()
            .flat_map(|client| (0..threads).map(move |_| one(client)));
        Self::start(mutexes, turns)
    }

    fn are_over(&self) -> bool {
        self.tasks.iter().all(Task::is_done)
    }

    /// Calls `fault` again and again until all threads have finished, and returns the number of calls. Fails if no
    /// grant follows a fault soon.
    #[track_caller]
    fn go_on_under(self, mut fault: impl FnMut()) -> usize {
        let mut faults = 0;
        while !self.are_over() {
            let entries = self.witness.entries();
            fault();
            faults += 1;
            let moved = eventually(SOON, || {
                self.witness.entries() > entries + 4 || self.are_over()
            });
            assert!(moved, "no grant after fault {faults}");
        }
        self.end();
        faults
    }

    /// Waits for all threads, which must finish soon after the last fault.
    #[track_caller]
    fn end(self) {
        for task in self.tasks {
            task.within(6 * SOON, "taking its turns");
        }
        assert_eq!(self.witness.entries(), self.expected);
    }
}
