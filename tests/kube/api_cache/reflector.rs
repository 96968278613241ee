//! A reader like a controller in Rust: a reflector of kube-rs, which prints the content of its store after each event.
//!
//! It is this program again, in a node's network; its output has the format of the client-go informer (`assets/informer`).

use std::{
    collections::HashMap,
    env,
    io::{Write, stdout},
    pin::pin,
    process::ExitCode,
};

use aws_lc_rs::digest::{SHA256, digest};
use data_encoding::HEXLOWER;
use futures_util::StreamExt;
use kube::{
    Api, Client, Config,
    api::{ApiResource, DynamicObject, GroupVersionKind},
    config::{KubeConfigOptions, Kubeconfig},
    runtime::{
        WatchStreamExt,
        reflector::{Lookup, ObjectRef, Store, reflector, store::Writer},
        watcher::{self, Event, watcher},
    },
};
use serde_json::{Value, json};
use tokio::runtime::Builder;

use super::views::SERVICES;
use crate::world::{net::Site, process::Program};

/// Variable that makes this program a reflector.
const REFLECTOR: &str = "CAUSEWAY_KUBE_REFLECTOR";

/// A reflector on a node, or beside the API server: it reads from this URL, or with this kubeconfig.
pub(super) fn program(site: Option<&Site>, at: &str, (resource, streams): (&str, bool)) -> Program {
    let own = env::current_exe().expect("this program has a path");
    let program = site.map_or_else(|| Program::new(&own), |site| site.at(&own));
    let beginning = if streams { "watch" } else { "list" };
    program.env(REFLECTOR, "1").args([at, resource, beginning])
}

/// Reads without end, if this program was started for that.
pub(crate) fn run() -> Option<ExitCode> {
    env::var_os(REFLECTOR)?;
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [at, resource, beginning] = &arguments[..] else {
        return Some(ExitCode::FAILURE);
    };
    let runtime = Builder::new_current_thread().enable_all().build().unwrap();
    let config = watcher::Config::default();
    let config = if beginning == "watch" {
        config.streaming_lists()
    } else {
        config
    };
    runtime.block_on(async {
        let api = Api::all_with(client(at).await, &kind(resource));
        follow(api, kind(resource), config).await;
    });
    Some(ExitCode::FAILURE)
}

fn kind(resource: &str) -> ApiResource {
    let kind = if resource == SERVICES {
        GroupVersionKind::gvk("", "v1", "Service")
    } else {
        GroupVersionKind::gvk("discovery.k8s.io", "v1", "EndpointSlice")
    };
    ApiResource::from_gvk(&kind)
}

async fn client(at: &str) -> Client {
    let config = if at.contains("://") {
        Config::new(at.parse().unwrap())
    } else {
        let file = Kubeconfig::read_from(at).unwrap();
        let options = KubeConfigOptions::default();
        Config::from_custom_kubeconfig(file, &options)
            .await
            .unwrap()
    };
    Client::try_from(config).unwrap()
}

/// Last reported name and version of each object.
type KnownObjects = HashMap<ObjectRef<DynamicObject>, Value>;

async fn follow(api: Api<DynamicObject>, kind: ApiResource, config: watcher::Config) {
    let writer = Writer::new(kind.clone());
    let store = writer.as_reader();
    let mut events = pin!(reflector(writer, watcher(api, config).default_backoff()));
    let mut known = KnownObjects::new();
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Init | Event::InitApply(_)) => {}
            Ok(Event::InitDone) => listed(&store, &kind, &mut known),
            Ok(Event::Apply(object)) => {
                let kept = store.get(&object.to_object_ref(kind.clone()));
                said(&kept.expect("the store has the change"), &kind, &mut known);
            }
            Ok(Event::Delete(object)) => {
                let key = object.to_object_ref(kind.clone());
                assert!(store.get(&key).is_none(), "the store has the change");
                known.remove(&key);
                say(&words("deleted", &object));
            }
            // The reflector continues by itself.
            Err(error) => eprintln!("reflector: {error}"),
        }
    }
}

/// Prints all objects of the store after a list, and those that it no longer has.
fn listed(store: &Store<DynamicObject>, kind: &ApiResource, known: &mut KnownObjects) {
    let mut before = std::mem::take(known);
    for object in store.state() {
        before.remove(&object.to_object_ref(kind.clone()));
        said(&object, kind, known);
    }
    for (_, mut gone) in before {
        gone["event"] = "deleted".into();
        say(&gone);
    }
    say(&json!({ "event": "synced" }));
}

fn said(object: &DynamicObject, kind: &ApiResource, known: &mut KnownObjects) {
    let words = words("updated", object);
    say(&words);
    known.insert(object.to_object_ref(kind.clone()), words);
}

fn say(words: &Value) {
    writeln!(stdout(), "{words}").expect("a process listens there");
}

/// A line for an object. The hash is over its JSON with sorted keys, without the fields that readers never compare.
fn words(event: &str, object: &DynamicObject) -> Value {
    let metadata = &object.metadata;
    let mut fields = serde_json::to_value(object).unwrap();
    let all = fields.as_object_mut().unwrap();
    all.retain(|name, _| name != "kind" && name != "apiVersion");
    if let Some(metadata) = all.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.remove("managedFields");
    }
    fields.sort_all_objects();
    let hash = digest(&SHA256, fields.to_string().as_bytes());
    json!({
        "event": event,
        "namespace": metadata.namespace,
        "name": metadata.name,
        "version": metadata.resource_version,
        "hash": HEXLOWER.encode(hash.as_ref()),
    })
}
