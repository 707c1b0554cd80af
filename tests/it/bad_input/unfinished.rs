//! Attempts to connect that do not end. A caller that leaves earlier has sent nothing, and its error names the step.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use leasehold::{Builder, Client, Credentials, Error, ErrorKind, Released};
use leasehold_testbed::Server;
use socket2::{Domain, Socket, Type};

use crate::fakes::{Fake, Manner};
use crate::support::{SOON, Task, kill_connections, lock, millis, secs};

/// A socket whose queue of connections is full, and the connections in the queue. The system does not answer further
/// attempts to connect.
pub fn full_backlog() -> (u16, Vec<Socket>) {
    let new = || Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let listener = new();
    let any = std::net::SocketAddr::from(([127, 0, 0, 1], 0));
    listener.bind(&any.into()).unwrap();
    listener.listen(0).unwrap();
    let address = listener.local_addr().unwrap();
    let port = address.as_socket().unwrap().port();
    let mut sockets = vec![listener];
    loop {
        let socket = new();
        match socket.connect_timeout(&address, millis(300)) {
            Ok(()) => sockets.push(socket),
            Err(_) => return (port, sockets),
        }
    }
}

/// The callers leave long before the attempt ends.
fn patient(url: &str) -> Builder {
    Client::builder(url)
        .connect_timeout(secs(60))
        .command_timeout(secs(2))
        .outage_timeout(millis(1))
}

/// A callback for credentials that does not return while `hangs` has a receiver.
fn hanging(builder: Builder, hangs: &Arc<Mutex<Option<Receiver<()>>>>) -> Builder {
    let hangs = Arc::clone(hangs);
    builder.credentials(move || {
        if let Some(released) = &*hangs.lock().unwrap() {
            let _ = released.recv();
        }
        Ok(Credentials::user("default", "any"))
    })
}

/// Fails unless the error names this step of connecting to `url`, and says that nothing was sent.
#[track_caller]
fn assert_names(error: &Error, url: &str, step: &str, next: &str) {
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let text = error.to_string();
    let address = url.rsplit('/').next().unwrap();
    let begin = format!("{address}: {step} has not ended after ");
    assert!(text.contains(&begin), "{text}");
    assert!(
        text.ends_with(&format!("s, so nothing was sent; {next}")),
        "{text}"
    );
}

#[test]
fn a_step_that_hangs_is_named() {
    let (port, _sockets) = full_backlog();
    let mute = Fake::start(Manner::Mute);
    let server = Server::start().unwrap();
    let (_release, released) = channel();
    let hangs = Arc::new(Mutex::new(Some(released)));
    let load = "check the server's load and the network";
    let mut cases: Vec<(Builder, String, &str, String)> = Vec::new();
    let backlog = format!("redis://127.0.0.1:{port}");
    let next = "check the address, and firewalls".to_owned();
    cases.push((patient(&backlog), backlog, "the TCP connection", next));
    #[cfg(feature = "tls")]
    {
        let url = mute.url().replace("redis:", "rediss:");
        let tls = leasehold::TlsConfig::new().ca_pem(crate::tls::certificates_for("x").1);
        let next = format!("{load}, and use redis:// if this port is one without TLS");
        cases.push((patient(&url).tls(tls), url, "the TLS handshake", next));
    }
    let url = server.url();
    cases.push((
        hanging(patient(&url), &hangs),
        url,
        "the callback of `Builder::credentials`",
        "check where it gets the login".to_owned(),
    ));
    cases.push((
        patient(&mute.url()),
        mute.url(),
        "the login",
        load.to_owned(),
    ));
    for (builder, url, step, next) in cases {
        let client = builder.build_lazy().unwrap();
        let call = |call: fn(&Client) -> Error| {
            let client = client.clone();
            Task::start(move || call(&client))
        };
        let tasks = [
            call(|client| client.mutex("a").try_lock().map(drop).unwrap_err()),
            call(|client| client.mutex("b").lock().map(drop).unwrap_err()),
            call(|client| client.mutex("c").inspect().map(drop).unwrap_err()),
            call(|client| {
                let brief = client.mutex("d").try_lock_for(millis(700));
                brief.map(drop).unwrap_err()
            }),
        ];
        for task in tasks {
            assert_names(&task.within(SOON, step), &url, step, &next);
        }
    }
}

/// The failed `inspect` leaves the pipeline of the key without a connection, so the release is not written.
#[test]
fn a_release_that_was_not_sent_names_the_step() {
    let server = Server::start().unwrap();
    let hangs: Arc<Mutex<Option<Receiver<()>>>> = Arc::default();
    let client = hanging(patient(&server.url()), &hangs).build().unwrap();
    let guard = lock(&client, "k");
    let (release, released): (Sender<()>, _) = channel();
    *hangs.lock().unwrap() = Some(released);
    kill_connections(&server);
    let other = client.clone();
    let read = Task::start(move || other.mutex("k").inspect().map(drop));
    assert!(read.within(SOON, "a read").unwrap_err().is_unavailable());
    let unlocked = Task::start(move || guard.unlock());
    let Released::Unconfirmed(error) = unlocked.within(SOON, "the unlock").unwrap() else {
        panic!("nothing was sent");
    };
    let (step, next) = (
        "the callback of `Builder::credentials`",
        "check where it gets the login",
    );
    assert_names(&error, &server.url(), step, next);
    drop(release);
}
