//! Tests of the library's sources, the headers made from them and the lists that must agree with them.

mod boundary;
mod declarations;
mod header;
mod layers;
mod loader;
mod promises;
mod sources;
