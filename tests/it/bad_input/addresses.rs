//! Addresses other than URLs: `redis::ConnectionInfo` and `redis::Client`.

use leasehold::redis::{self, ConnectionAddr, ConnectionInfo, IntoConnectionInfo};
use leasehold::{Client, ErrorKind, ServerAddress};

use super::all_texts;
use crate::support::{ask, in_redis, server};

const SECRET: &str = "hunter2";

/// The address of `url`, with a login whose characters a URL would have to encode.
fn info(url: &str) -> ConnectionInfo {
    let info = url.into_connection_info().unwrap();
    let login = info.redis_settings().clone();
    info.set_redis_settings(
        login
            .set_username("a:user")
            .set_password(format!("{SECRET}@/%")),
    )
}

#[test]
fn a_connection_info_keeps_its_settings() {
    let server = server();
    let rights = ["reset", "on", ">hunter2@/%", "~*", "&*", "+@all"];
    ask(
        &server,
        &[&["ACL", "SETUSER", "a:user"], &rights[..]].concat(),
    );
    let info = info(&server.url());
    let settings = info.redis_settings().clone().set_db(3);
    let info = info.set_redis_settings(settings);
    let redis = redis::Client::open(info.clone()).unwrap();
    let clients = [
        Client::open(info.clone()),
        Client::open(&redis),
        Client::open(redis),
        Client::builder(info).build_lazy(),
    ];
    for (n, client) in clients.into_iter().enumerate() {
        let client = client.unwrap();
        let key = format!("k{n}");
        let _guard = client.mutex(&key).lock().unwrap();
        let held = ask(&server, &["EXISTS", &in_redis(&key)]);
        assert_eq!(held.as_int(), Some(0), "the lock is in database 0");
        let other = Client::open(format!("{}/3", server.url())).unwrap();
        assert!(other.mutex(&key).is_locked().unwrap());
    }
}

#[cfg(unix)]
#[test]
fn a_client_connects_to_a_unix_socket() {
    let builder = leasehold_testbed::Server::builder();
    let server = builder.unix_socket().start().unwrap();
    let url = server.unix_url().expect("the server has a unix socket");
    let path = url.strip_prefix("unix://").unwrap().into();
    let info = ConnectionAddr::Unix(path).into_connection_info().unwrap();
    let client = Client::open(info).unwrap();
    assert_eq!(client.with_lock("k", || 1).unwrap(), 1);
}

#[test]
fn an_unusable_address_is_refused_without_connecting() {
    let tls = ConnectionAddr::TcpTls {
        host: SECRET.to_owned(),
        port: 1,
        insecure: true,
        tls_params: None,
    };
    let no_tls = match cfg!(feature = "tls") {
        true => "without a check of certificates",
        false => "cargo feature `tls`",
    };
    let host = |host: &str| ConnectionAddr::Tcp(host.to_owned(), 1);
    for (address, why) in [
        (tls, no_tls),
        (host(""), "no host"),
        (host(&format!("{SECRET}%40127.0.0.1")), "in the host"),
        (host(&format!("u:{SECRET}@127.0.0.1")), "in the host"),
        (host(&format!("{SECRET}/127.0.0.1")), "in the host"),
        (ConnectionAddr::Tcp("127.0.0.1".to_owned(), 0), "the port 0"),
    ] {
        let info = address.into_connection_info().unwrap();
        let shown = format!("{:?}", ServerAddress::from(info.clone()));
        assert!(!shown.contains(SECRET), "{shown}");
        for error in [
            Client::open(info.clone()).unwrap_err(),
            Client::builder(info).build_lazy().unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
            let text = all_texts(&error);
            assert!(text.contains(why), "{text}");
            assert!(text.contains("address: "), "{text}");
            assert!(!text.contains(SECRET), "{text}");
        }
    }
}

#[test]
fn the_login_of_a_connection_info_is_hidden() {
    let address = ServerAddress::from(info("redis://127.0.0.1:1"));
    let builder = Client::builder(address.clone());
    let shown = format!("{address:?} {builder:?}");
    assert!(shown.contains("127.0.0.1:1"), "{shown}");
    let error = builder.build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    for text in [shown, all_texts(&error)] {
        assert!(!text.contains(SECRET) && !text.contains("a:user"), "{text}");
    }
}
