// Asio and Beast compiled once for the whole program (BOOST_ASIO_SEPARATE_COMPILATION and
// BOOST_BEAST_SEPARATE_COMPILATION are defined for every user of boost_headers).
#include <boost/asio/impl/src.hpp>
#include <boost/beast/src.hpp>
