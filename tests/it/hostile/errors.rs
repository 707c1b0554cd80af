//! A server whose errors repeat secrets of the client: the password, and lease ids.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use leasehold::{Error, EventHandler, EventLock, LossReason};
use leasehold_testbed::{Server, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, ask, in_redis, lock, lost_within, server, texts_of, unconfirmed,
};

const PASSWORD: &str = "hunter2secret";

/// A relay to a Redis. After [`reply_with`](Self::reply_with), it replies to each command with an error.
struct ErrorRelay {
    port: u16,
    /// The error to reply with. `None` while the relay passes requests to Redis.
    error: Arc<Mutex<Option<&'static str>>>,
    ended: Arc<AtomicBool>,
}

impl ErrorRelay {
    fn start(redis: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (error, ended) = (Arc::default(), Arc::<AtomicBool>::default());
        let (of_all, is_over) = (Arc::clone(&error), Arc::clone(&ended));
        thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                if is_over.load(Ordering::Acquire) {
                    return;
                }
                let error = Arc::clone(&of_all);
                thread::spawn(move || relay(client, redis, &error));
            }
        });
        Self { port, error, ended }
    }

    /// Replies with this error from now on. In the error, `ID` is replaced by the lease ids of the request.
    fn reply_with(&self, error: &'static str) {
        *self.error.lock().unwrap() = Some(error);
    }
}

impl Drop for ErrorRelay {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Release);
        // Unblocks the thread that accepts connections.
        let _ = TcpStream::connect(("127.0.0.1", self.port));
    }
}

fn relay(mut client: TcpStream, redis: u16, error: &Mutex<Option<&'static str>>) {
    let mut redis = TcpStream::connect(("127.0.0.1", redis)).unwrap();
    let (mut replies, mut to_client) = (redis.try_clone().unwrap(), client.try_clone().unwrap());
    thread::spawn(move || std::io::copy(&mut replies, &mut to_client));
    let mut request = [0; 64 * 1024];
    loop {
        let n = client.read(&mut request).unwrap_or(0);
        let error = *error.lock().unwrap();
        let sent = match error {
            _ if n == 0 => return,
            None => redis.write_all(&request[..n]),
            Some(error) => client.write_all(errors(&request[..n], error).as_bytes()),
        };
        if sent.is_err() {
            return;
        }
    }
}

/// The error reply, once for each command of a request.
fn errors(request: &[u8], error: &str) -> String {
    let request = String::from_utf8_lossy(request);
    let commands = request.split("\r\n").filter(|part| part.starts_with('*'));
    let id = ids(&request).join(" ");
    let reply = format!("-{}\r\n", error.replace("ID", &id));
    reply.repeat(commands.count())
}

/// The runs of 32 hexadecimal digits, which is the form of a lease id.
fn ids(text: &str) -> Vec<&str> {
    let runs = text.split(|c: char| !c.is_ascii_hexdigit());
    runs.filter(|run| run.len() == 32).collect()
}

#[derive(Default)]
struct Seen(Mutex<Vec<String>>);

impl EventHandler for Seen {
    fn release_delayed(&self, _: EventLock<'_>, error: &Error) {
        self.0.lock().unwrap().extend(texts_of(error));
    }
}

#[test]
fn errors_show_neither_the_password_nor_a_lease() {
    thread::scope(|scope| {
        for (error, shown) in [
            (
                "ERR bad password hunter2secret of ID",
                "bad password <password> of",
            ),
            ("ERR x", "ERR x"),
            ("IDhunter2secret x", "<password> x"),
            ("hunter2secret ID", "<password> "),
            ("NOPERM hunter2secretID", "NOPERM <password>"),
            ("FOREIGN hunter2secretID", "a value of another type"),
        ] {
            scope.spawn(move || assert_is_hidden(error, shown));
        }
    });
}

/// Makes calls that all get the reply `error`. Fails if an error of these calls shows the password or a lease id, or if
/// none contains `shown`.
fn assert_is_hidden(error: &'static str, shown: &str) {
    let server = Server::builder().password(PASSWORD).start().unwrap();
    let relay = ErrorRelay::start(server.port());
    let seen = Arc::new(Seen::default());
    // With two pipelines, the calls below could be the first on the second one, and get the error during its login only.
    let client = steady(&format!("redis://:{PASSWORD}@127.0.0.1:{}", relay.port))
        .ttl(LONG_TTL)
        .pipelines(1)
        .event_handler(Arc::clone(&seen))
        .build()
        .unwrap();
    let guards = ["a", "b", "c"].map(|key| lock(&client, key));
    // Opens the connection for transactions.
    guards[2].transaction(|_, _| Ok(())).unwrap();
    relay.reply_with(error);
    let [first, second, third] = guards;
    let other = client.mutex("k");
    let mut texts: Vec<String> = [
        other.try_lock().map(drop).unwrap_err(),
        other.inspect().map(drop).unwrap_err(),
        other.force_unlock().map(drop).unwrap_err(),
        client.fenced_value("v").read().map(drop).unwrap_err(),
        first.extend(LONG_TTL).unwrap_err(),
        third
            .transaction(|connection, _| redis::cmd("GET").arg("x").query::<()>(connection))
            .map(drop)
            .unwrap_err(),
        // The error FOREIGN reports a loss instead of a delay.
        second
            .unlock()
            .map_or_else(|lost| lost, |released| unconfirmed(Ok(released))),
    ]
    .iter()
    .flat_map(texts_of)
    .collect();
    drop(first);
    let is_loss = error.starts_with("FOREIGN");
    assert!(is_loss || eventually(SOON, || !seen.0.lock().unwrap().is_empty()));
    texts.append(&mut seen.0.lock().unwrap());
    for text in &texts {
        assert!(!text.contains(PASSWORD), "{text}");
        assert!(ids(text).is_empty(), "{text}");
    }
    assert!(texts.iter().any(|text| text.contains(shown)), "{texts:#?}");
}

#[test]
fn a_holder_with_a_lease_id_is_hidden() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = lock(&client, "k");
    let id = "0123456789abcdef0123456789abcdef";
    let forged = format!("lh1 {id} 1795263780943818 host/1/{id}");
    ask(&server, &["SET", &in_redis("k"), &forged]);
    let reason = lost_within(SOON, &guard.lost_signal());
    assert!(
        matches!(&reason, LossReason::TakenOver { by: None }),
        "{reason}"
    );
}
